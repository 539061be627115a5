"""How fast a candidate is beside the original: paired blocks in random order, until the answer is clear."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fxlib.reasons import Reason
from fxlib.spec.report import Estimate
from fxlib.spec.trial import TrialOptions
from fxlib_workers.exchange.candidate import ORIGINAL, Arm
from fxlib_workers.trial.selection.statistics import ConfidenceSequence, rate

RunBlock = Callable[[Arm, int], float]
"""Runs so many steps of an arm and returns their seconds."""

BLOCK_S: Final = 0.25
"""Aim for the length of a block: long beside a scheduler's time slice, short beside a machine's moods."""

_BLOCKS_OF_BUDGET: Final = 40
_MOST_STEPS: Final = 4096

_LEAST_PAIRS: Final = 12
"""Fewer could tell a large gain, but the interval would be of little use to whoever reads it."""


@dataclass(slots=True, kw_only=True)
class Speed:
    """Figures so far. Seconds of blocks by arm; each block holds `steps` steps."""

    candidate: Arm
    confidence: float
    samples_per_step: float
    steps: int
    seconds: dict[Arm, list[float]] = field(init=False)
    log_ratios: ConfidenceSequence = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no pair."""
        self.seconds = {ORIGINAL: [], self.candidate: []}
        self.log_ratios = ConfidenceSequence(self.confidence)

    @property
    def pairs(self) -> int:
        """How many pairs of blocks there are."""
        return len(self.log_ratios)

    def add(self, seconds: dict[Arm, float]) -> None:
        """Take in one pair."""
        for arm, value in seconds.items():
            self.seconds[arm].append(value)
        self.log_ratios.add(math.log(seconds[ORIGINAL] / seconds[self.candidate]))

    @property
    def gain(self) -> Estimate:
        """The gain in QPS, with its interval."""
        return self.log_ratios.gain()

    def qps(self, arm: Arm) -> Estimate:
        """Samples per second of an arm, with its interval."""
        seconds = self.seconds[arm]
        return rate([self.steps * self.samples_per_step] * len(seconds), seconds, self.confidence)

    def verdict(self, min_gain: float) -> Reason | None:
        """Return what the pairs so far say; None if they leave it open.

        The interval speaks of the typical pair; all blocks together must be faster by as much, too, so that rare long
        stalls of the candidate count.
        """
        least = math.log1p(min_gain)
        if self.pairs < _LEAST_PAIRS:
            return None
        if self.log_ratios.above(least) and sum(self.seconds[ORIGINAL]) > (1 + min_gain) * sum(
            self.seconds[self.candidate]
        ):
            return Reason.FASTER
        return Reason.NOT_FASTER if self.log_ratios.below(least) else None


def measure(
    run: RunBlock,
    options: TrialOptions,
    *,
    candidate: Arm,
    deadline: float,
    samples_per_step: float,
    steps: int | None = None,
    report: Callable[[Speed], None] = lambda _: None,
    coin: random.Random | None = None,
) -> tuple[Speed, Reason]:
    """Measure until the interval is clear of the least gain, or until `deadline` (on the monotonic clock).

    Args:
        run: runs a block.
        options: least gain and confidence.
        candidate: the arm beside the original.
        deadline: when the budget is used up.
        samples_per_step: the batch size.
        steps: in a block; None where no arm is warm yet: then blocks that are not counted find it out.
        report: told after each pair.
        coin: says which arm of a pair runs first; the interval is only as good as its tosses are fair.

    Returns:
        The figures, and FASTER, NOT_FASTER or BUDGET_EXHAUSTED.
    """
    coin, arms = coin or random.SystemRandom(), (ORIGINAL, candidate)
    steps = steps or steps_per_block(run, arms, deadline)
    speed = Speed(candidate=candidate, confidence=options.confidence, samples_per_step=samples_per_step, steps=steps)
    while (verdict := speed.verdict(options.min_gain)) is None:
        if time.monotonic() > deadline:
            return speed, Reason.BUDGET_EXHAUSTED
        order = arms if coin.random() < 0.5 else arms[::-1]
        speed.add({arm: run(arm, steps) for arm in order})
        report(speed)
    return speed, verdict


def steps_per_block(run: RunBlock, arms: Sequence[Arm], deadline: float) -> int:
    """Warm arms up, and return how many steps make a block of the aimed length, or of a share of the budget."""
    aim_s = min(BLOCK_S, max(0.0, deadline - time.monotonic()) / _BLOCKS_OF_BUDGET)
    steps = 1
    while True:
        longest_s = max(run(arm, steps) for arm in arms)
        if longest_s >= aim_s / 2 or steps >= _MOST_STEPS or time.monotonic() > deadline:
            return max(1, min(_MOST_STEPS, round(steps * aim_s / max(longest_s, 1e-9))))
        steps *= 2
