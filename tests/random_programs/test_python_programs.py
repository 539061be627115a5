"""What a capture takes for granted of Python is watched: random programs, whose state changes between steps."""

import pytest

from tests.random_programs.python_programs import check

EXPORT = pytest.mark.parametrize("export", [False, True], ids=["traced", "exported"])


@EXPORT
@pytest.mark.parametrize("seed", range(6))
def test_a_captured_program_does_what_it_would_do_uncaptured(seed: int, export: bool) -> None:
    assert check(seed, export=export)


@EXPORT
@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(20, 320, 20)], ids=str)
def test_three_hundred_programs_do_what_they_would_do_uncaptured(seeds: range, export: bool) -> None:
    outcomes = [check(seed, export=export) for seed in seeds]
    assert outcomes.count("captured") > len(outcomes) // 2
