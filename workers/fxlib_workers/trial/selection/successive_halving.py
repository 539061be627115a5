"""Which of several candidates to go on with: successive halving over rounds of interleaved blocks.

It decides and does not act: rounds and failures go in, the arms of the next round come out. In a round, the original
and all remaining candidates run one block each. After each rung, half of the candidates are dropped, by their medians.
A rung has as many blocks as the one before it, so that the fewer candidates there are, the better they are told apart.
The result chooses a candidate and proves nothing, since the best of several is partly best by luck: the caller has to
measure the chosen one again.

Source: Z. Karnin, T. Koren and O. Somekh, "Almost Optimal Exploration in Multi-Armed Bandits" (2013).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from fxlib.profiling.statistics import ConfidenceSequence
from fxlib.spec.report import Estimate
from fxlib_workers.exchange.candidate import ORIGINAL, Arm

_FIRST_RUNG: Final = 6
LEAST_ROUNDS: Final = 3
"""The rounds after which a candidate may be dropped within a rung, at the earliest."""


class SuccessiveHalving:
    """Narrows several candidates down to one.

    Args:
        candidates: the candidates' names, the most promising first: that one is left if nothing is measured.
        confidence: the level of the intervals, e.g. 0.95.
    """

    def __init__(self, candidates: Sequence[str], confidence: float) -> None:
        self._confidence = confidence
        self._left = list(candidates)
        self._dropped: list[str] = []
        self._log_ratios: dict[str, list[float]] = {name: [] for name in candidates}
        self._blocks_of_a_rung = _FIRST_RUNG * (len(candidates) + 1)
        self._blocks = 0

    @property
    def round(self) -> tuple[Arm, ...]:
        """The arms of the next round: none once a single candidate is left."""
        return (ORIGINAL, *self._left) if len(self._left) > 1 else ()

    @property
    def ranking(self) -> tuple[str, ...]:
        """All candidates that did not fail, the best first: the remaining ones by median, then the last dropped."""
        return tuple(sorted(self._left, key=self._sort_key) + self._dropped[::-1])

    def rounds(self, candidate: str) -> int:
        """Return how many rounds a candidate took part in."""
        return len(self._log_ratios[candidate])

    def gain(self, candidate: str) -> Estimate | None:
        """Return a candidate's gain in QPS over the original, with its interval; None if it was in no round."""
        if not self._log_ratios[candidate]:
            return None
        sequence = ConfidenceSequence(self._confidence)
        for value in self._log_ratios[candidate]:
            sequence.add(value)
        return sequence.gain()

    def add(self, seconds: Mapping[Arm, float]) -> tuple[str, ...]:
        """Add one round, the seconds of a block of each arm, and return the candidates that are dropped after it."""
        for name in self._left:
            self._log_ratios[name].append(math.log(seconds[ORIGINAL] / seconds[name]))
        self._blocks += len(seconds)
        leaving = set(self._beaten())
        if self._blocks >= self._blocks_of_a_rung:
            self._blocks = 0
            leaving.update(self.ranking[math.ceil(len(self._left) / 2) : len(self._left)])
        dropped = tuple(name for name in reversed(self.ranking) if name in leaving)
        self._left = [name for name in self._left if name not in leaving]
        self._dropped += dropped
        return dropped

    def fail(self, candidate: str) -> None:
        """Take a candidate that failed out of the ranking."""
        for names in (self._left, self._dropped):
            if candidate in names:
                names.remove(candidate)

    def _sort_key(self, candidate: str) -> float:
        return -median(self._log_ratios[candidate] or [0.0])

    def _beaten(self) -> list[str]:
        """Return the candidates whose best round is behind the worst of the leader's, relative to the original."""
        leader, *others = sorted(self._left, key=self._sort_key)
        if self.rounds(leader) < LEAST_ROUNDS:
            return []
        worst = min(self._log_ratios[leader])
        return [name for name in others if max(self._log_ratios[name]) < worst]
