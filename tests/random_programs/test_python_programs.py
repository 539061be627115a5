"""What a capture takes for granted of Python is watched: random programs, whose state changes between steps."""

import pytest

from tests.random_programs.python_programs import check
from tests.shared.many import many

EXPORT = pytest.mark.parametrize("export", [False, True], ids=["traced", "exported"])


@EXPORT
@pytest.mark.parametrize("seed", range(6))
def test_a_captured_program_does_what_it_would_do_uncaptured(seed: int, export: bool) -> None:
    assert check(seed, export=export)


@EXPORT
@pytest.mark.slow
def test_many_programs_do_what_they_would_do_uncaptured(export: bool) -> None:
    outcomes = [check(seed, export=export) for seed in range(6, 6 + many(20))]
    assert outcomes.count("captured") > len(outcomes) // 2
