"""Which candidate is the fastest, and whether it is faster than the original: it is chosen first, and then proven."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Final

from fxlib.reasons import Reason
from fxlib.spec.report import Estimate
from fxlib.spec.trial import TrialOptions
from fxlib_workers.exchange.candidate import ORIGINAL, Arm
from fxlib_workers.trial.failures import CandidateError
from fxlib_workers.trial.selection.outcomes import Contest
from fxlib_workers.trial.selection.speed import RunBlock, Speed, measure, steps_per_block
from fxlib_workers.trial.selection.successive_halving import Halving

CHOICE_SHARE: Final = 0.4
"""Of what is left of the budget, the most that choosing among candidates may take."""

Progress = Callable[[str, str], None]
"""Takes a phase, and a line about it."""


class Race:
    """Runs blocks of the original and of the candidates that stand.

    Args:
        run: runs a block; raises CandidateError where a candidate fails.
        contest: says who stands, and is told what becomes of each.
        samples_per_step: of all trainers together.
        deadline: when the budget ends, on the monotonic clock.
        recover: brings the processes into order after a failure.
        coin: decides on the order of blocks.
    """

    def __init__(
        self,
        run: RunBlock,
        contest: Contest,
        options: TrialOptions,
        *,
        samples_per_step: float,
        deadline: float,
        recover: Callable[[], None] = lambda: None,
        progress: Progress = lambda *_: None,
        coin: random.Random | None = None,
    ) -> None:
        self._run = run
        self._contest = contest
        self._options = options
        self._samples_per_step = samples_per_step
        self._deadline = deadline
        self._recover = recover
        self._progress = progress
        self._coin = coin or random.SystemRandom()

    def confirm(self, ranking: Sequence[Arm], steps: int | None) -> tuple[Speed, Reason]:
        """Measure the first candidate anew beside the original, and return these fresh figures and the verdict.

        What chose it does not count: the best of several is best by luck, too. If it fails, the next takes its place.

        Args:
            ranking: the candidates, the best first.
            steps: in a block; None where nothing is known of them.

        Raises:
            TrialError: every candidate failed, or the trial cannot go on.
        """
        chosen = "chosen, and measured anew: " if len(ranking) > 1 else ""
        for arm in ranking:
            try:
                speed, verdict = self._confirm(arm, steps)
            except CandidateError as error:
                self._fail(error)
                continue
            self._contest.tell(arm, chosen + verdict.sentence(), speed.gain if speed.pairs else None)
            return speed, verdict
        raise AssertionError("a contest that ran out of candidates has raised")

    def choose(self) -> tuple[tuple[Arm, ...], int]:
        """Return the candidates, the best first, and how many steps make a block.

        Raises:
            TrialError: every candidate failed, or the trial cannot go on.
        """
        deadline = time.monotonic() + CHOICE_SHARE * max(0.0, self._deadline - time.monotonic())
        steps = self._warm_up()
        halving = Halving(self._contest.standing, self._options.confidence)
        while (arms := halving.round) and time.monotonic() < deadline:
            try:
                gone = halving.add({arm: self._run(arm, steps) for arm in self._coin.sample(arms, len(arms))})
            except CandidateError as error:
                halving.fail(error.arm)
                self._fail(error)
                continue
            self._tell(halving, gone)
        for arm in halving.ranking[1:]:
            self._contest.tell(arm, _passed_over(halving, arm), halving.gain(arm))
        return halving.ranking, steps

    def _warm_up(self) -> int:
        while True:
            try:
                return steps_per_block(self._run, (ORIGINAL, *self._contest.standing), self._deadline)
            except CandidateError as error:
                self._fail(error)

    def _confirm(self, arm: Arm, steps: int | None) -> tuple[Speed, Reason]:
        return measure(
            self._run,
            self._options,
            candidate=arm,
            deadline=self._deadline,
            samples_per_step=self._samples_per_step,
            steps=steps,
            report=lambda speed: self._progress("qps", _pair(speed)),
            coin=self._coin,
        )

    def _fail(self, error: CandidateError) -> None:
        self._contest.fail(error.arm, error)
        self._recover()

    def _tell(self, halving: Halving, gone: tuple[Arm, ...]) -> None:
        for arm in gone:
            self._contest.tell(arm, _passed_over(halving, arm), halving.gain(arm))
        leader, rounds = halving.ranking[0], halving.rounds(halving.ranking[0])
        self._progress("choice", f"round {rounds}: {leader!r} leads with {_gain(halving.gain(leader))}")


def _passed_over(halving: Halving, arm: Arm) -> str:
    """Say why a candidate was not the one to go on with."""
    leader = halving.ranking[0]
    told = f"{_gain(halving.gain(arm))} in {halving.rounds(arm)} rounds"
    return f"passed over: {told}, beside {_gain(halving.gain(leader))} of {leader!r}"


def _gain(gain: Estimate | None) -> str:
    return "no figure" if gain is None else f"{gain.value:+.1%} QPS"


def _pair(speed: Speed) -> str:
    gain = speed.gain
    interval = f" ({gain.low:+.1%} to {gain.high:+.1%})" if isfinite(gain.high) else ""
    return f"pair {speed.pairs}: {gain.value:+.1%} QPS{interval}"
