"""What a capture takes for granted of Python is watched: random programs, whose state changes between steps."""

import pytest

from tests.random_programs.python_programs import check


@pytest.mark.parametrize("seed", range(12))
def test_a_captured_program_does_what_it_would_do_uncaptured(seed: int) -> None:
    assert check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(20, 320, 20)], ids=str)
def test_three_hundred_programs_do_what_they_would_do_uncaptured(seeds: range) -> None:
    outcomes = [check(seed) for seed in seeds]
    assert outcomes.count("captured") > len(outcomes) // 2
