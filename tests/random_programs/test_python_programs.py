"""What a capture takes for granted of Python is watched: random programs, whose state changes between steps."""

import pytest

from tests.random_programs.python_programs import check
from tests.shared.many import many

pytestmark = pytest.mark.slow

TRACED, EXPORTED = 10, 5


@pytest.mark.parametrize("first", range(0, 240, TRACED))
def test_captured_programs_do_what_they_would_do_uncaptured(first: int) -> None:
    for seed in range(first, first + TRACED):
        assert check(seed)


@pytest.mark.parametrize("first", range(0, 60, EXPORTED))
def test_so_do_exported_ones(first: int) -> None:
    for seed in range(first, first + EXPORTED):
        assert check(seed, export=True)


@pytest.mark.parametrize("export", [False, True], ids=["traced", "exported"])
def test_most_programs_are_captured(export: bool) -> None:
    outcomes = [check(seed, export=export) for seed in range(300, 300 + many(20))]
    assert outcomes.count("captured") > len(outcomes) // 2
