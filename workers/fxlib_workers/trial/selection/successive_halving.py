"""Which of several candidates to go on with: successive halving over rounds of interleaved blocks.

It decides and does not act: rounds and failures in, the arms of the next round out. In a round, the original and all
candidates that are left run one block each. After each rung, half of the candidates leave, by their medians; a rung has
as many blocks as the one before it, so that the fewer there are, the better they are told apart. What it finds chooses
a candidate and proves nothing: the best of several is best by luck, too. So whoever uses it measures the one that is
left again.

Source: Z. Karnin, T. Koren and O. Somekh, "Almost Optimal Exploration in Multi-Armed Bandits" (2013).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from fxlib.spec.report import Estimate
from fxlib_workers.exchange.candidate import ORIGINAL, Arm
from fxlib_workers.trial.selection.statistics import ConfidenceSequence

_FIRST_RUNG: Final = 6
LEAST_ROUNDS: Final = 3
"""Before a candidate may leave within a rung."""


class Halving:
    """Candidates on their way to one.

    Args:
        candidates: their names, the most promising first: it is left if nothing is measured.
        confidence: level of the intervals.
    """

    def __init__(self, candidates: Sequence[Arm], confidence: float) -> None:
        self._confidence = confidence
        self._left = list(candidates)
        self._out: list[Arm] = []
        self._log_ratios: dict[Arm, list[float]] = {arm: [] for arm in candidates}
        self._blocks_of_a_rung = _FIRST_RUNG * (len(candidates) + 1)
        self._blocks = 0

    @property
    def round(self) -> tuple[Arm, ...]:
        """The arms of the next round; none once a single candidate is left."""
        return (ORIGINAL, *self._left) if len(self._left) > 1 else ()

    @property
    def ranking(self) -> tuple[Arm, ...]:
        """All candidates that did not fail, the best first: those left by their medians, then whoever left last."""
        return tuple(sorted(self._left, key=self._place) + self._out[::-1])

    def rounds(self, candidate: Arm) -> int:
        """Return how many rounds a candidate took part in."""
        return len(self._log_ratios[candidate])

    def gain(self, candidate: Arm) -> Estimate | None:
        """Return a candidate's gain in QPS over the original, with its interval; None if it was in no round."""
        if not self._log_ratios[candidate]:
            return None
        sequence = ConfidenceSequence(self._confidence)
        for value in self._log_ratios[candidate]:
            sequence.add(value)
        return sequence.gain()

    def add(self, seconds: Mapping[Arm, float]) -> tuple[Arm, ...]:
        """Take in one round: seconds of a block of each of its arms; return the candidates that leave with it."""
        for arm in self._left:
            self._log_ratios[arm].append(math.log(seconds[ORIGINAL] / seconds[arm]))
        self._blocks += len(seconds)
        leaving = set(self._beaten())
        if self._blocks >= self._blocks_of_a_rung:
            self._blocks = 0
            leaving.update(self.ranking[math.ceil(len(self._left) / 2) : len(self._left)])
        gone = tuple(arm for arm in reversed(self.ranking) if arm in leaving)
        self._left = [arm for arm in self._left if arm not in leaving]
        self._out += gone
        return gone

    def fail(self, candidate: Arm) -> None:
        """Take in that a candidate failed: it is out of the ranking, too."""
        for arms in (self._left, self._out):
            if candidate in arms:
                arms.remove(candidate)

    def _place(self, candidate: Arm) -> float:
        return -median(self._log_ratios[candidate] or [0.0])

    def _beaten(self) -> list[Arm]:
        """Return the candidates whose best round is behind the worst of the leader's, relative to the original."""
        leader, *others = sorted(self._left, key=self._place)
        if self.rounds(leader) < LEAST_ROUNDS:
            return []
        return [arm for arm in others if max(self._log_ratios[arm]) < min(self._log_ratios[leader])]
