"""Which candidates a trial measures: those that do what the original does, and as many as the budget has room for."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from fxlib.reasons import Reason
from fxlib.spec.trial import TrialOptions
from fxlib_workers.exchange.candidate import MOVED, ORIGINAL, Arm
from fxlib_workers.exchange.job_folder import Tell
from fxlib_workers.trial.cluster_run import World
from fxlib_workers.trial.failures import CandidateError, TrialError
from fxlib_workers.trial.selection.bitwise_check import Difference, Sameness, describe
from fxlib_workers.trial.selection.outcomes import Contest
from fxlib_workers.trial.selection.select import CHOICE_SHARE
from fxlib_workers.trial.selection.speed import BLOCK_S
from fxlib_workers.trial.selection.successive_halving import LEAST_ROUNDS
from fxlib_workers.trial.trainer import Trace

T = TypeVar("T")

_MOST: Final = 3
_BUDGET_OF_ONE_S: Final = 5.0
"""With less of a budget for each, what is spent on choosing among them is missed in the confirmation."""

_SHARE: Final = 0.3
"""Of the budget for checking candidates besides the first that passes."""

_SLACK: Final = 4.0
"""How many times farther from the original a candidate may be than the original itself, elsewhere in memory."""

_NO_ROOM: Final = "not tried: the budget had no room for it beside those that were expected to be faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """Runs the original and each candidate, and compares what they leave behind.

    Attributes:
        world: with the original loaded.
        contest: its candidates are loaded here, one after another.
        deadline: when the budget ends, on the monotonic clock.
    """

    world: World
    contest: Contest
    options: TrialOptions
    deadline: float
    tell: Tell

    def run(self) -> None:
        """Load and check candidates, and leave in the contest those that passed.

        Raises:
            TrialError: no candidate passed, or the trial cannot go on.
        """
        begun = time.monotonic()
        most_s = _SHARE * max(0.0, self.deadline - begun)
        same, passed = Sameness(self._traces), 0
        room = self._room((time.monotonic() - begun) / (2 * self.options.sameness_steps))
        for arm in self.contest.standing:
            if passed and (passed >= room or time.monotonic() - begun > most_s):
                self.contest.leave(arm, _NO_ROOM)
                continue
            try:
                self._check(arm, same)
                passed += 1
            except CandidateError as error:
                self.contest.fail(arm, error)
            finally:
                self.contest.not_reproduced = same.not_reproduced

    def _room(self, step_s: float) -> int:
        """Return for how many candidates the budget has room, each step of which takes so long."""
        left_s = self.deadline - time.monotonic()
        blocks = CHOICE_SHARE * left_s / max(BLOCK_S, step_s)
        return min(_MOST, int(self.options.budget_s / _BUDGET_OF_ONE_S), int(blocks / LEAST_ROUNDS) - 1)

    def _check(self, arm: Arm, same: Sameness) -> None:
        draft = self.contest.drafts[arm]
        self.world.admit(arm, draft.graph, draft.values)
        difference = same.difference(arm)
        if difference and draft.report.preserves == "bitwise":
            if not difference <= (owed := self._owed_to_alignment(arm, difference)):
                raise CandidateError(arm, Reason.NOT_SAME, describe(difference - owed))
            same.leave_out(owed)
        self.contest.errors[arm] = self._error(arm, difference) if difference else 0.0

    def _owed_to_alignment(self, arm: Arm, difference: frozenset[Difference]) -> frozenset[Difference]:
        """Return what differs about as little as it does between two runs of the original, elsewhere in memory.

        Of a server's state only digests are known, so it is never among this.
        """
        for each in (ORIGINAL, MOVED, arm):
            self._traces(each, numeric=True)
        own, found = (self._errors(each) for each in (MOVED, arm))
        return frozenset(
            (step, name) for step, name in difference if found.get(name, math.inf) <= _SLACK * own.get(name, 0.0)
        )

    def _error(self, arm: Arm, difference: frozenset[Difference]) -> float:
        """Return the largest relative error among what differs.

        Raises:
            CandidateError: it is above the bound.
        """
        bound, known = self.options.max_relative_error, self._errors(arm)
        names = dict.fromkeys(name for _, name in sorted(difference))
        errors = {name: known[name] for name in names if name in known}
        worst = max(errors, key=errors.__getitem__, default="")
        if worst and errors[worst] > bound:
            detail = f"{worst} has a relative error of {errors[worst]:.3g}, and max_relative_error is {bound:g}"
            raise CandidateError(arm, Reason.NOT_SAME, detail)
        if unmeasured := frozenset(each for each in difference if each[1] not in known):
            self.contest.unmeasured[arm] = f"{describe(unmeasured)} (differs, and is not measured)"
        return errors.get(worst, 0.0)

    def _errors(self, arm: Arm) -> Mapping[str, float]:
        return _joined(self.world.ask_of(arm, self.world.witnesses, "errors", timeout_s=self.options.step_timeout_s))

    def _traces(self, arm: Arm, *, numeric: bool = False) -> Sequence[Trace]:
        steps, limit_s = self.options.sameness_steps, self.options.step_timeout_s
        what = f"the {arm}" if arm in (ORIGINAL, MOVED) else f"the candidate {arm!r}"
        numeric = numeric or any(draft.report.preserves != "bitwise" for draft in self.contest.drafts.values())
        self.tell("sameness", f"running {steps} steps of {what}")
        self.world.reset(limit_s)
        traces = []
        for step in range(steps):
            if time.monotonic() > self.deadline:
                raise TrialError(Reason.BUDGET_EXHAUSTED, "")
            told = self.world.ask_of(arm, self.world.witnesses, "trace", step, numeric, timeout_s=limit_s)
            traces.append(_joined(told))
        return traces


def _joined(by_rank: Sequence[Mapping[str, T]]) -> Mapping[str, T]:
    """Return what all ranks tell, by name, as one; of a single one, just that."""
    if len(by_rank) == 1:
        return by_rank[0]
    return {f"rank {rank}: {name}": each for rank, trace in enumerate(by_rank) for name, each in trace.items()}
