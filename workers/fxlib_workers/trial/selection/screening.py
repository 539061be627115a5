"""Selects the candidates to measure: those that do what the original does, and as many as the budget has room for.

A candidate does so if it leaves the same bits behind as the original, as far as the original reproduces its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from fxlib.reasons import Reason
from fxlib.spec.job import TrialOptions
from fxlib_workers.exchange import ORIGINAL, REALIGNED, Arm, ReportProgress
from fxlib_workers.trial.cluster_run import ClusterRun
from fxlib_workers.trial.compiled_parts import without_parts
from fxlib_workers.trial.failures import CandidateError, TrialError
from fxlib_workers.trial.selection.outcomes import CandidateOutcomes
from fxlib_workers.trial.selection.select import CHOICE_SHARE, LEAST_ROUNDS
from fxlib_workers.trial.selection.speed import BLOCK_S
from fxlib_workers.trial.server_state import UNKNOWN
from fxlib_workers.trial.trainer import StepDigests

RunArm = Callable[[Arm], Sequence[StepDigests]]
"""A function that resets everything, runs the steps of an arm, and returns the digests after each step."""

_Difference = tuple[int, str]
"""A step, from 0, and the name of what differs after it."""

_CANDIDATE_RUNS: Final = 2
_ORIGINAL_RERUNS: Final = 2
T = TypeVar("T")

_MOST_CANDIDATES: Final = 3
"""The most candidates that are tried if they differ only in their order, which the cost model can rank."""

_MOST_UNRANKED: Final = 10
"""The most candidates that are tried if some compute differently, so that only a measurement can rank them."""

_COMPILING_SHARE: Final = 0.5
"""The share of the remaining budget that compiling one of several candidates may take."""

_BUDGET_PER_CANDIDATE_S: Final = 5.0
"""The least budget in seconds for each candidate: with less, the confirmation would lack the time spent on choosing."""

_ROUND_S: Final = 10.0
"""The seconds to which a budget that suffices is rounded up."""

_PIPELINED_UPDATES: Final = 10
"""The least number of updates to compare if a candidate runs under a pipeline: each way of reading is taken twice."""

_CHECK_SHARE: Final = 0.3
"""The share of the budget for checking candidates after the first that passes."""

_REALIGNMENT_SLACK: Final = 4.0
"""The factor by which a candidate may be farther from the original than the realigned original is."""


class BitwiseCheck:
    """Compares candidates with two runs of the original, which it makes when it is constructed.

    Values that differ between runs of the original are excluded, step by step, and named. If a candidate differs, the
    original runs again, since values that it reproduces only sometimes are no measure of a candidate.

    Args:
        run: the function that runs an arm.
    """

    def __init__(self, run: RunArm) -> None:
        self._run = run
        self._reference = run(ORIGINAL)
        self._excluded = _differences(self._reference, run(ORIGINAL)) | _unknown(self._reference)

    @property
    def not_reproduced(self) -> tuple[str, ...]:
        """The names of the values that could not be compared, since the original does not reproduce them."""
        return _names(self._excluded)

    def difference(
        self, candidate: str, judge: Callable[[frozenset[_Difference]], object] | None = None
    ) -> frozenset[_Difference]:
        """Run a candidate twice, and return all differences.

        Args:
            candidate: its name.
            judge: a function that is called with the differences after each run, and may raise; without one, a run that
                differs is the last.
        """
        differing = set[_Difference]()
        for _ in range(_CANDIDATE_RUNS):
            found = _differences(self._reference, self._run(candidate)) - self._excluded - differing
            for _ in range(_ORIGINAL_RERUNS if found else 0):
                self._excluded |= _differences(self._reference, self._run(ORIGINAL))
            differing = (differing | found) - self._excluded
            if differing:
                if judge is None:
                    break
                judge(frozenset(differing))
        return frozenset(differing)


def describe(differences: Iterable[_Difference]) -> str:
    """Return a text that says what differs and after which step first; "" if nothing differs."""
    if not (differences := set(differences)):
        return ""
    first = min(step for step, _ in differences)
    names = sorted(name for step, name in differences if step == first)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"after step {first + 1}: {', '.join(names[:3])}{more}"


def _differences(one: Sequence[StepDigests], other: Sequence[StepDigests]) -> set[_Difference]:
    return {
        (step, name)
        for step, (before, after) in enumerate(zip(one, other, strict=True))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }


def _unknown(steps: Sequence[StepDigests]) -> set[_Difference]:
    return {(step, name) for step, found in enumerate(steps) for name, digest in found.items() if digest == UNKNOWN}


def _names(differences: Iterable[_Difference], how: str = "") -> tuple[str, ...]:
    first: dict[str, int] = {}
    for step, name in sorted(differences):
        first.setdefault(name, step)
    return tuple(f"{name} (from step {step + 1} on{how})" for name, step in first.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """Runs the original and each candidate, and compares the values that they leave behind.

    Attributes:
        cluster: the processes of the trial, which have loaded the original.
        outcomes: the candidates, which are loaded here one after another.
        options: the options of the trial.
        accumulation: the number of steps for each update.
        deadline: the end of the budget, on the monotonic clock.
        report_progress: the function that passes progress on.
    """

    cluster: ClusterRun
    outcomes: CandidateOutcomes
    options: TrialOptions
    accumulation: int
    deadline: float
    report_progress: ReportProgress

    def run(self) -> None:
        """Load and check candidates, and remove those that did not pass from the outcomes.

        Raises:
            TrialError: no candidate passed, or the trial cannot continue.
        """
        start = time.monotonic()
        most_s = _CHECK_SHARE * max(0.0, self.deadline - start)
        check, passed = BitwiseCheck(self._run_arm), 0
        room = self._room((time.monotonic() - start) / (2 * self._steps))
        for candidate in self.outcomes.remaining:
            if passed and (passed >= room or time.monotonic() - start > most_s):
                self.outcomes.drop(candidate, self._why_not(room, most_s, passed, time.monotonic() - start))
                continue
            try:
                self._check(candidate, check)
                passed += 1
            except CandidateError as error:
                self.outcomes.fail(candidate, error)
            finally:
                self.outcomes.not_reproduced = check.not_reproduced

    @property
    def _steps(self) -> int:
        """The number of steps that are compared: with the step behind an update, and under a pipeline behind many."""
        if any(each.report.pipeline for each in self.outcomes.candidates.values()):
            return max(self.options.sameness_steps, _PIPELINED_UPDATES * self.accumulation + 1)
        return max(self.options.sameness_steps, self.accumulation + 1 if self.accumulation > 1 else 0)

    def _room(self, step_s: float) -> int:
        """Return the number of candidates that the budget has room for if a step takes `step_s`."""
        left_s = self.deadline - time.monotonic()
        blocks = CHOICE_SHARE * left_s / max(BLOCK_S, step_s)
        by_budget = int(self.options.budget_s / _BUDGET_PER_CANDIDATE_S)
        return min(self._most, by_budget, int(blocks / LEAST_ROUNDS) - 1)

    @property
    def _most(self) -> int:
        ranked = all(each.report.preserves == "bitwise" for each in self.outcomes.candidates.values())
        return _MOST_CANDIDATES if ranked else _MOST_UNRANKED

    def _why_not(self, room: int, most_s: float, passed: int, spent_s: float) -> str:
        """Return the verdict on a candidate that is not tried, with a budget that would have room for all."""
        if passed >= self._most:
            return f"not tried: at most {passed} are, and those were expected to be faster"
        # Whichever ran out: the room for measuring them, or the time for checking them.
        count, budget_s = len(self.outcomes.candidates), self.options.budget_s
        more = max((count + 1) / (room + 1), spent_s / most_s * count / passed if most_s else 1.0)
        enough_s = _ROUND_S * math.ceil(max(budget_s * more, count * _BUDGET_PER_CANDIDATE_S) / _ROUND_S)
        return f"not tried: the budget of {budget_s:g} s had no room for it; {enough_s:g} s should have"

    def _check(self, name: str, check: BitwiseCheck) -> None:
        candidate = self.outcomes.candidates[name]
        report = candidate.report
        self.cluster.load_candidate(name, candidate.graph, candidate.values, report.pipeline, report.stale)
        self._settle_parts(name)
        is_bitwise = report.preserves == "bitwise"
        difference = check.difference(name, None if is_bitwise else partial(self._error, name))
        if difference and is_bitwise:
            excused = self._explained_by_alignment(name)
            if {what for _, what in difference} <= excused:  # the next run may differ in something else
                difference |= check.difference(name)
            if at_fault := [each for each in difference if each[1] not in excused]:
                raise CandidateError(name, Reason.NOT_SAME, describe(at_fault))
            as_little = ", by about as little as the original in other memory"
            self.outcomes.by_alignment[name] = _names(difference, as_little)
        self.outcomes.errors[name] = self._error(name, difference) if difference else 0.0

    def _settle_parts(self, name: str) -> None:
        """Compile the parts for a backend in all trainers within the time of a step, and keep the faster ones.

        If there are other candidates, this takes at most a share of the remaining budget.

        Raises:
            CandidateError: no part is faster, and no other pass did anything.
        """
        candidate, trainers = self.outcomes.candidates[name], self.cluster.trainers
        passes = {each.name: each.changes for each in candidate.report.passes}
        if not passes.pop("lower", 0):
            return
        self.report_progress("sameness", f"compiling parts of the candidate {name!r}")
        self.cluster.reset(limit_s := self.options.step_timeout_s)
        left_s = max(0.0, self.deadline - time.monotonic())
        most_s = limit_s if len(self.outcomes.remaining) == 1 else min(limit_s, _COMPILING_SHARE * left_s)
        parts, *others = self.cluster.ask_of(name, trainers, "time_parts", most_s, timeout_s=most_s + 2 * limit_s)
        slower = {each.first: each for parts_of_one in others for each in parts_of_one if not each.compiled}
        parts = [slower.get(each.first, each) for each in parts]  # if one trainer leaves a part uncompiled, all do
        if left := [each for each in parts if not each.compiled]:
            self.cluster.ask_of(name, trainers, "leave_parts", [each.first for each in left], timeout_s=limit_s)
        self.outcomes.settle(name, without_parts(candidate.graph, left), parts)
        if len(left) == len(parts) and not any(passes.values()):
            raise CandidateError(name, Reason.NO_PART_FASTER, left[0].why if left else "")

    def _explained_by_alignment(self, name: str) -> frozenset[str]:
        """Return the names of values that differ about as little as the original's in memory of another alignment.

        A value that is the original's in both memories is not among them, even if the candidate's is no farther: it
        differs in the sign of a zero, in the bits of a NaN, or only in other runs. Only digests are known of a server's
        state, so it is never among them.
        """
        for arm in (ORIGINAL, REALIGNED, name):
            self._run_arm(arm, numeric=True)
        own, found = (self._errors(arm) for arm in (REALIGNED, name))
        return frozenset(
            what
            for what, error in own.items()
            if error > 0.0 and found.get(what, math.inf) <= _REALIGNMENT_SLACK * error
        )

    def _error(self, name: str, difference: frozenset[_Difference]) -> float:
        """Return the largest relative error among the differing values.

        Raises:
            CandidateError: it is above the bound.
        """
        bound, known = self.options.max_relative_error, self._errors(name)
        names = dict.fromkeys(what for _, what in sorted(difference))
        errors = {what: known[what] for what in names if what in known}
        worst = max(errors, key=errors.__getitem__, default="")
        if worst and errors[worst] > bound:
            detail = f"{worst} has a relative error of {errors[worst]:.3g}, and max_relative_error is {bound:g}"
            raise CandidateError(name, Reason.NOT_SAME, detail)
        if unmeasured := frozenset(each for each in difference if each[1] not in known):
            self.outcomes.unmeasured[name] = f"{describe(unmeasured)} (differs, and is not measured)"
        return errors.get(worst, 0.0)

    def _errors(self, arm: Arm) -> Mapping[str, float]:
        limit_s = self.options.step_timeout_s
        return _by_rank(self.cluster.ask_of(arm, self.cluster.step_trainers, "errors", timeout_s=limit_s))

    def _run_arm(self, arm: Arm, *, numeric: bool = False) -> Sequence[StepDigests]:
        steps, limit_s = self._steps, self.options.step_timeout_s
        what = f"the {arm}" if arm in (ORIGINAL, REALIGNED) else f"the candidate {arm!r}"
        numeric = numeric or any(each.report.preserves != "bitwise" for each in self.outcomes.candidates.values())
        self.report_progress("sameness", f"running {steps} steps of {what}")
        self.cluster.reset(limit_s)
        digests = []
        for step in range(steps):
            if time.monotonic() > self.deadline:
                raise TrialError(Reason.BUDGET_EXHAUSTED, "", survived=True)
            answers = self.cluster.ask_of(
                arm, self.cluster.step_trainers, "digest_step", step, numeric, timeout_s=limit_s
            )
            digests.append(_by_rank(answers))
        return digests


def _by_rank(answers: Sequence[Mapping[str, T]]) -> Mapping[str, T]:
    """Return the answers of all ranks as one, with the rank in each name; a single rank's answer stays unchanged."""
    if len(answers) == 1:
        return answers[0]
    return {f"rank {rank}: {name}": each for rank, answer in enumerate(answers) for name, each in answer.items()}
