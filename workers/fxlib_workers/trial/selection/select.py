"""Which candidate is the fastest, and whether it is faster than the original: it is chosen first, then confirmed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Final

from fxlib.reasons import Reason
from fxlib.spec.report import Estimate
from fxlib.spec.trial import TrialOptions
from fxlib_workers.exchange.candidate import ORIGINAL
from fxlib_workers.trial.failures import CandidateError
from fxlib_workers.trial.selection.outcomes import CandidateOutcomes
from fxlib_workers.trial.selection.speed import RunBlock, Speed, measure, steps_per_block
from fxlib_workers.trial.selection.successive_halving import SuccessiveHalving

CHOICE_SHARE: Final = 0.4
"""The largest share of the remaining budget that choosing among candidates may take."""

Progress = Callable[[str, str], None]
"""A function that takes a phase, and a line about it."""


class Selection:
    """Runs blocks of the original and of the remaining candidates.

    Args:
        run: the function that runs a block; it raises CandidateError where a candidate fails.
        outcomes: the remaining candidates, and what becomes of each.
        options: the options of the trial.
        samples_per_step: the samples of all trainers together in one step.
        deadline: the end of the budget, on the monotonic clock.
        recover: the function that resets the processes after a failure.
        progress: the function that passes progress on.
        rng: the random generator that decides on the order of blocks.
    """

    def __init__(
        self,
        run: RunBlock,
        outcomes: CandidateOutcomes,
        options: TrialOptions,
        *,
        samples_per_step: float,
        deadline: float,
        recover: Callable[[], None] = lambda: None,
        progress: Progress = lambda *_: None,
        rng: random.Random | None = None,
    ) -> None:
        self._run = run
        self._outcomes = outcomes
        self._options = options
        self._samples_per_step = samples_per_step
        self._deadline = deadline
        self._recover = recover
        self._progress = progress
        self._rng = rng or random.SystemRandom()

    def confirm(self, ranking: Sequence[str], steps: int | None) -> tuple[Speed, Reason]:
        """Measure the first candidate anew beside the original, and return these fresh figures and the verdict.

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
        """Return the candidates, the best first, and how many steps make a block.

        Raises:
            TrialError: every candidate failed, or the trial cannot go on.
        """
        deadline = time.monotonic() + CHOICE_SHARE * max(0.0, self._deadline - time.monotonic())
        steps = self._warm_up()
        halving = SuccessiveHalving(self._outcomes.remaining, self._options.confidence)
        while (arms := halving.round) and time.monotonic() < deadline:
            try:
                dropped = halving.add({arm: self._run(arm, steps) for arm in self._rng.sample(arms, len(arms))})
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
                return steps_per_block(self._run, (ORIGINAL, *self._outcomes.remaining), self._deadline)
            except CandidateError as error:
                self._fail(error)

    def _confirm(self, candidate: str, steps: int | None) -> tuple[Speed, Reason]:
        return measure(
            self._run,
            self._options,
            candidate=candidate,
            deadline=self._deadline,
            samples_per_step=self._samples_per_step,
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
    """Say why another candidate was chosen."""
    leader = halving.ranking[0]
    own = f"{_gain(halving.gain(candidate))} in {halving.rounds(candidate)} rounds"
    return f"passed over: {own}, beside {_gain(halving.gain(leader))} of {leader!r}"


def _gain(gain: Estimate | None) -> str:
    return "no figure" if gain is None else f"{gain.value:+.1%} QPS"


def _pair(speed: Speed) -> str:
    gain = speed.gain
    interval = f" ({gain.low:+.1%} to {gain.high:+.1%})" if isfinite(gain.high) else ""
    return f"pair {speed.pairs}: {gain.value:+.1%} QPS{interval}"
