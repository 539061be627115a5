"""Finds the fastest candidate and whether it is faster than the original: it is first chosen, then confirmed.

Successive halving over rounds of interleaved blocks decides which of several to continue with. It decides and does not
act: rounds and failures go in, and the arms of the next round come out. In a round, the original and all remaining
candidates run one block each. After each rung, half of the candidates are dropped, by their medians. A rung has as many
blocks as the one before it, so that the fewer candidates there are, the better they are distinguished. This chooses a
candidate but proves nothing, since the best of several is partly best by luck, so the chosen one is measured again.

Source: Z. Karnin, T. Koren and O. Somekh, "Almost Optimal Exploration in Multi-Armed Bandits" (2013).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Final

from fxlib.profiling.statistics import ConfidenceSequence
from fxlib.reasons import Reason
from fxlib.spec.job import TrialOptions
from fxlib.spec.report import Estimate
from fxlib_workers.exchange import ORIGINAL, Arm
from fxlib_workers.trial.failures import CandidateError
from fxlib_workers.trial.selection.outcomes import CandidateOutcomes
from fxlib_workers.trial.selection.speed import Blocks, Speed, measure

_FIRST_RUNG: Final = 6
LEAST_ROUNDS: Final = 3
"""The least number of rounds after which a candidate may be dropped within a rung."""
CHOICE_SHARE: Final = 0.4
"""The largest share of the remaining budget that choosing among candidates may take."""

Progress = Callable[[str, str], None]
"""A function that takes a phase and a line about it."""


class SuccessiveHalving:
    """Narrows several candidates down to one.

    Args:
        candidates: the candidates' names, the most promising first, which is left if nothing is measured.
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
        """The arms of the next round; none if a single candidate is left."""
        return (ORIGINAL, *self._left) if len(self._left) > 1 else ()

    @property
    def ranking(self) -> tuple[str, ...]:
        """All candidates that did not fail, the best first: the remaining ones by median, then the last dropped."""
        return tuple(sorted(self._left, key=self._sort_key) + self._dropped[::-1])

    def rounds(self, candidate: str) -> int:
        """Return the number of rounds that a candidate took part in."""
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
        """Remove a failed candidate from the ranking."""
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


class Selection:
    """Runs blocks of the original and of the remaining candidates.

    Args:
        blocks: the blocks of all arms, which raise CandidateError if a candidate fails.
        outcomes: the remaining candidates and their outcomes.
        options: the options of the trial.
        deadline: the end of the budget, on the monotonic clock.
        recover: the function that resets the processes after a failure.
        progress: the function that passes progress on.
        rng: the random generator that decides on the order of blocks.
    """

    def __init__(
        self,
        blocks: Blocks,
        outcomes: CandidateOutcomes,
        options: TrialOptions,
        *,
        deadline: float,
        recover: Callable[[], None] = lambda: None,
        progress: Progress = lambda *_: None,
        rng: random.Random | None = None,
    ) -> None:
        self._blocks = blocks
        self._outcomes = outcomes
        self._options = options
        self._deadline = deadline
        self._recover = recover
        self._progress = progress
        self._rng = rng or random.SystemRandom()

    def confirm(self, ranking: Sequence[str], steps: int | None) -> tuple[Speed, Reason]:
        """Measure the first candidate anew against the original, and return the fresh figures and the verdict.

        The figures that chose it do not count, since the best of several is partly best by luck. If it fails, the next
        one takes its place.

        Args:
            ranking: the candidates, the best first.
            steps: the number of steps in a block; None if no block has been run yet.

        Raises:
            TrialError: every candidate failed, or the trial cannot go on.
        """
        chosen = "chosen, and measured anew: " if len(ranking) > 1 else ""
        for candidate in ranking:
            try:
                speed, verdict = self._confirm(candidate, steps)
            except CandidateError as error:
                self._fail(error)
                continue
            self._outcomes.note(candidate, chosen + verdict.sentence(), speed.gain if speed.pairs else None)
            return speed, verdict
        raise AssertionError("`outcomes.fail` raises when no candidate is left")

    def choose(self) -> tuple[tuple[str, ...], int]:
        """Return the candidates, the best first, and the number of steps in a block.

        Raises:
            TrialError: every candidate failed, or the trial cannot go on.
        """
        deadline = time.monotonic() + CHOICE_SHARE * max(0.0, self._deadline - time.monotonic())
        steps = self._warm_up()
        halving = SuccessiveHalving(self._outcomes.remaining, self._options.confidence)
        while (arms := halving.round) and time.monotonic() < deadline:
            try:
                dropped = halving.add(self._blocks(self._rng.sample(arms, len(arms)), steps).seconds)
            except CandidateError as error:
                halving.fail(error.candidate)
                self._fail(error)
                continue
            self._note(halving, dropped)
        for candidate in halving.ranking[1:]:
            self._outcomes.note(candidate, _passed_over(halving, candidate), halving.gain(candidate))
        return halving.ranking, steps

    def _warm_up(self) -> int:
        while True:
            try:
                return self._blocks.fill((ORIGINAL, *self._outcomes.remaining), self._deadline)
            except CandidateError as error:
                self._fail(error)

    def _confirm(self, candidate: str, steps: int | None) -> tuple[Speed, Reason]:
        return measure(
            self._blocks,
            self._options,
            candidate=candidate,
            deadline=self._deadline,
            steps=steps,
            report=lambda speed: self._progress("qps", _pair(speed)),
            rng=self._rng,
        )

    def _fail(self, error: CandidateError) -> None:
        self._outcomes.fail(error.candidate, error)
        self._recover()

    def _note(self, halving: SuccessiveHalving, dropped: tuple[str, ...]) -> None:
        for candidate in dropped:
            self._outcomes.note(candidate, _passed_over(halving, candidate), halving.gain(candidate))
        leader, rounds = halving.ranking[0], halving.rounds(halving.ranking[0])
        self._progress("choice", f"round {rounds}: {leader!r} leads with {_gain(halving.gain(leader))}")


def _passed_over(halving: SuccessiveHalving, candidate: str) -> str:
    """Return why another candidate was chosen."""
    leader = halving.ranking[0]
    own = f"{_gain(halving.gain(candidate))} in {halving.rounds(candidate)} rounds"
    return f"passed over: {own}, beside {_gain(halving.gain(leader))} of {leader!r}"


def _gain(gain: Estimate | None) -> str:
    return "no figure" if gain is None else f"{gain.value:+.1%} QPS"


def _pair(speed: Speed) -> str:
    gain = speed.gain
    interval = f" ({gain.low:+.1%} to {gain.high:+.1%})" if isfinite(gain.high) else ""
    return f"pair {speed.pairs}: {gain.value:+.1%} QPS{interval}"
