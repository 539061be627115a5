"""Measures a candidate's speed against the original in paired blocks in random order, until the answer is clear."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fxlib.profiling.statistics import ConfidenceSequence, rate
from fxlib.reasons import Reason
from fxlib.spec.job import TrialOptions
from fxlib.spec.report import Estimate
from fxlib_workers.exchange import ORIGINAL, Arm

RunBlock = Callable[[Arm, int, int], float]
"""A function that runs steps of an arm, given the first one's index and their number, and returns their seconds."""

BLOCK_S: Final = 0.25
"""The length of a block in seconds: long compared to a scheduler's time slice, short compared to drifts of speed."""

_BLOCKS_OF_BUDGET: Final = 40
_MOST_STEPS: Final = 4096

_LEAST_PAIRS: Final = 12
"""The least number of pairs: fewer can show a large gain, but with a wide interval, so more follow if there is time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One block of each of several arms, all on the same batches.

    Attributes:
        seconds: the seconds of each arm's block.
        samples: the samples in each of the blocks.
    """

    seconds: Mapping[Arm, float]
    samples: float


class Blocks:
    """Runs rounds of blocks, each of which continues with the batches behind those of the round before.

    Args:
        run: the function that runs a block.
        samples: the samples of each batch; the batches repeat.
        accumulation: the number of steps for each update. A block has a multiple of it, and so as large a share of
            updates and pushes as training has.
    """

    def __init__(self, run: RunBlock, samples: Sequence[float], accumulation: int = 1) -> None:
        self._run = run
        self._samples = samples
        self._accumulation = accumulation
        self._first = 0

    def __call__(self, arms: Iterable[Arm], steps: int) -> Round:
        """Run a block of so many steps of each arm, in this order."""
        first, self._first = self._first, self._first + steps
        samples = sum(self._samples[index % len(self._samples)] for index in range(first, self._first))
        return Round(seconds={arm: self._run(arm, first, steps) for arm in arms}, samples=samples)

    def fill(self, arms: Sequence[Arm], deadline: float) -> int:
        """Warm up the arms, and return the steps that fill a block: `BLOCK_S`, or a fortieth of the budget if less."""
        aim_s = min(BLOCK_S, max(0.0, deadline - time.monotonic()) / _BLOCKS_OF_BUDGET)
        updates, most = 1, max(1, _MOST_STEPS // self._accumulation)
        while True:
            longest_s = max(self(arms, updates * self._accumulation).seconds.values())
            if longest_s >= aim_s / 2 or updates >= most or time.monotonic() > deadline:
                return self._accumulation * max(1, min(most, round(updates * aim_s / max(longest_s, 1e-9))))
            updates *= 2


@dataclass(slots=True, kw_only=True)
class Speed:
    """The figures so far of one candidate compared to the original.

    Attributes:
        candidate: the candidate's name.
        confidence: the level of the intervals, e.g. 0.95.
        steps: the steps in one block.
        seconds: the seconds of each block, by arm.
        samples: the samples in each block of an arm.
        log_ratios: the logarithms of the original's seconds over the candidate's, one for each pair.
    """

    candidate: str
    confidence: float
    steps: int
    seconds: dict[Arm, list[float]] = field(init=False)
    samples: list[float] = field(init=False)
    log_ratios: ConfidenceSequence = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no pair."""
        self.seconds = {ORIGINAL: [], self.candidate: []}
        self.samples = []
        self.log_ratios = ConfidenceSequence(self.confidence)

    @property
    def pairs(self) -> int:
        """The number of pairs of blocks."""
        return len(self.log_ratios)

    def add(self, pair: Round) -> None:
        """Add one pair: a block of each arm."""
        for arm, value in pair.seconds.items():
            self.seconds[arm].append(value)
        self.samples.append(pair.samples)
        self.log_ratios.add(math.log(pair.seconds[ORIGINAL] / pair.seconds[self.candidate]))

    @property
    def gain(self) -> Estimate:
        """The gain in QPS, with its interval."""
        return self.log_ratios.gain()

    def qps(self, arm: Arm) -> Estimate:
        """Return the samples per second of an arm, with their interval."""
        return rate(self.samples, self.seconds[arm], self.confidence)

    def verdict(self, min_gain: float, *, least_pairs: int = _LEAST_PAIRS) -> Reason | None:
        """Return the verdict of the pairs so far; None if they leave it open or are fewer than `least_pairs`.

        The interval is for the typical pair. All blocks together must also be faster by as much, so that rare long
        stalls of the candidate count.
        """
        least = math.log1p(min_gain)
        if self.pairs < least_pairs:
            return None
        if self.log_ratios.above(least) and sum(self.seconds[ORIGINAL]) > (1 + min_gain) * sum(
            self.seconds[self.candidate]
        ):
            return Reason.FASTER
        return Reason.NOT_FASTER if self.log_ratios.below(least) else None


def measure(
    blocks: Blocks,
    options: TrialOptions,
    *,
    candidate: str,
    deadline: float,
    steps: int | None = None,
    report: Callable[[Speed], None] = lambda _: None,
    rng: random.Random | None = None,
) -> tuple[Speed, Reason]:
    """Measure until the interval is clear of the least gain, or until `deadline` (on the monotonic clock).

    Args:
        blocks: the blocks of both arms.
        options: the least gain and the confidence.
        candidate: the candidate's name.
        deadline: the end of the budget, on the monotonic clock.
        steps: the steps in a block; None if no arm is warm yet, and blocks that do not count are to find it out.
        report: a function that is called after each pair.
        rng: the random generator that decides which arm of a pair runs first; the interval holds only if it is fair.

    Returns:
        The figures, and FASTER, NOT_FASTER or BUDGET_EXHAUSTED.
    """
    rng, arms = rng or random.SystemRandom(), (ORIGINAL, candidate)
    steps = steps or blocks.fill(arms, deadline)
    speed = Speed(candidate=candidate, confidence=options.confidence, steps=steps)
    while (verdict := speed.verdict(options.min_gain)) is None:
        if time.monotonic() > deadline:
            return speed, speed.verdict(options.min_gain, least_pairs=1) or Reason.BUDGET_EXHAUSTED
        order = arms if rng.random() < 0.5 else arms[::-1]
        speed.add(blocks(order, steps))
        report(speed)
    return speed, verdict
