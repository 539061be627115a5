"""One trial from end to end: processes up, a profile, sameness, choice, speed, timelines, and the decision."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from fxlib.reasons import Reason
from fxlib.runtime import exposed_s
from fxlib.spec.profile import Profile
from fxlib.spec.report import CallReport, Report, Timeline
from fxlib.spec.trial import TrialOptions
from fxlib.spec.variant import MAIN
from fxlib.spec.workload import Workload
from fxlib_workers.config import TrialSettings
from fxlib_workers.exchange.candidate import ORIGINAL, Arm, Draft
from fxlib_workers.exchange.job_folder import Tell
from fxlib_workers.trial.cluster_run import World
from fxlib_workers.trial.failures import TrialError
from fxlib_workers.trial.selection.outcomes import Contest
from fxlib_workers.trial.selection.screening import Screening
from fxlib_workers.trial.selection.select import Race
from fxlib_workers.trial.selection.speed import Speed
from fxlib_workers.trial.trainer import Material

_FIRST_SHARE: Final = 0.5
"""Of the budget, for the job's own step where there are variants besides."""

_RECORDED_STEPS: Final = 5
_RECORDING_SHARE: Final = 0.05
"""Of the budget: what recording steps may take on top of it, one step of each arm apart."""

_MUCH: Final = 0.1
"""The share of a step from which on a call's exposed time asks for a reason."""
_BLOCK_SLACK: Final = 20
"""A block that takes so many times what it should counts as hung, once a single step's time limit is over, too."""

NOTEWORTHY: Final = 0.1
"""Share of the measured time from which on it is told."""

_BUDGET_TO_PROFILE_S: Final = 10.0
"""With less, the seconds that a profile takes are missed in the measurement."""


_PROFILE_SHARE: Final = 0.1
"""Of the budget: for the steps of a profile, and for planning again, which takes as long as it did the first time."""

_PROFILE_SLACK: Final = 5
"""A profile whose steps take so many times what they should counts as hung."""

_PROBES_S: Final = 30.0
"""How long trying the servers out may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One trial to run.

    Attributes:
        drafts: the candidates as planned without a measurement, the most promising first.
        plan_anew: takes what the original was measured to take, and returns candidates planned by it; None where the
            drafts stand as they are.
        profile: what remote functions that no server has are replayed from.
    """

    workload: Workload
    options: TrialOptions
    material: Material
    drafts: Sequence[Draft]
    plan_anew: Callable[[Profile], Sequence[Draft]] | None = None
    profile: Profile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer, and the candidate of which it speaks."""

    report: Report
    chosen: Draft


def conduct(
    orders: Mapping[str, Order], settings: TrialSettings, tell: Tell, interrupted: Callable[[], bool]
) -> dict[str, Outcome]:
    """Run a trial of each program of a job, one after another in the same processes, and return what became of each.

    That is what the passes did for the candidate chosen, completed by what the trial found. The programs share the
    budget of the first. One that ends the trial for good ends it for those after it, too.

    Args:
        orders: by name, at least one; all have the same servers and as many trainers.
        settings: the operator's.
        tell: passes progress on.
        interrupted: whether the trial is to end at once.

    Raises:
        InterruptedTrialError: `interrupted` said so.
    """
    conductors = {name: _Conductor(order, _named(name, tell)) for name, order in orders.items()}
    outcomes: dict[str, Outcome] = {}
    first = next(iter(orders.values()))
    tell("sameness", "starting trainers and parameter servers")
    start = time.monotonic()
    try:
        with World(first.workload, first.material, settings, interrupted, first.profile) as world:
            started = time.monotonic()
            budget = _Budget(first.options.budget_s, started, len(orders))
            for name, conductor in conductors.items():
                try:
                    outcomes[name] = conductor.run(world, start if conductor.order is first else None, budget.next())
                except TrialError as error:
                    if not error.survived:
                        raise
                    outcomes[name] = conductor.decide(None, error.reason, error.detail)
    except TrialError as error:
        for name, conductor in conductors.items():
            if name not in outcomes:
                outcomes[name] = conductor.decide(None, error.reason, error.detail)
    return outcomes


class _Budget:
    """Divides the budget: the first program may take half, and what it leaves the others have in equal parts."""

    def __init__(self, budget_s: float, started: float, programs: int) -> None:
        self._ends = started + budget_s
        self._left = programs
        self._first = True

    def next(self) -> float:
        """Return the seconds of the next program.

        Raises:
            TrialError: none is left.
        """
        left_s = self._ends - time.monotonic()
        share = 1.0 if self._left == 1 else _FIRST_SHARE if self._first else 1.0 / self._left
        self._left, self._first = self._left - 1, False
        if left_s <= 0:
            raise TrialError(Reason.BUDGET_EXHAUSTED, "", survived=True)
        return share * left_s


def _named(name: str, tell: Tell) -> Tell:
    if name == MAIN:
        return tell
    return lambda phase, message, progress=None: tell(phase, f"{name}: {message}", progress)


class _Conductor:
    def __init__(self, order: Order, tell: Tell) -> None:
        self.order = order
        self._options = order.options
        self._tell = tell
        self._contest = Contest(order.drafts)
        self._phase_seconds: dict[str, float] = {}

    def run(self, world: World, start: float | None, budget_s: float) -> Outcome:
        """Run the trial; `start` is when the world began to come up, None where it has served another program."""
        begun = time.monotonic() if start is None else start
        if start is None:
            world.turn_to(self.order.workload, self.order.material, self.order.profile)
        world.prepare()
        world.settle(self._options.step_timeout_s)
        self._options = replace(self._options, budget_s=budget_s)
        started = self._clock("start", begun)
        deadline = started + budget_s
        planned = self._plan(world, started)
        Screening(world=world, contest=self._contest, options=self._options, deadline=deadline, tell=self._tell).run()
        checked = self._clock("sameness", planned)
        race = self._race(world, deadline)
        ranking, steps = self._contest.standing, None
        if len(ranking) > 1:
            ranking, steps = race.choose()
            checked = self._clock("choice", checked)
        speed, verdict = race.confirm(ranking, steps)
        measured = self._clock("qps", checked)
        timelines = self._timelines(world, speed)
        self._clock("timeline", measured)
        outcome = self.decide(speed.candidate, verdict)
        shares = world.ask(world.trainers, "share_waited", timeout_s=self._options.step_timeout_s)
        report = replace(outcome.report, notes=note_of(max(shares)))
        return replace(outcome, report=_with_speed(_with_timelines(report, *timelines), speed))

    def decide(self, chosen: Arm | None, reason: Reason, detail: str = "") -> Outcome:
        draft = self._contest.drafts[chosen] if chosen else next(iter(self._contest.drafts.values()))
        report = self._contest.report(draft.name)
        report = replace(
            report,
            decision="adopt" if reason is Reason.FASTER else "keep_original",
            reason=reason,
            explanation=reason.sentence(detail),
            phase_seconds={**report.phase_seconds, **self._phase_seconds},
        )
        return Outcome(report=report, chosen=draft)

    def _clock(self, phase: str, since: float) -> float:
        now = time.monotonic()
        self._phase_seconds[phase] = now - since
        return now

    def _plan(self, world: World, since: float) -> float:
        """Measure the original, and have the candidates planned by that, where it is wanted and there is time."""
        planned_s = self.order.drafts[0].report.phase_seconds.get("rewrite", 0.0)
        rich = self._options.budget_s >= _BUDGET_TO_PROFILE_S and planned_s < _PROFILE_SHARE * self._options.budget_s
        if self.order.plan_anew is None or not rich:
            return since
        self._tell("profile", "measuring calls, servers and local work of the original")
        seconds, limit_s = _PROFILE_SHARE * self._options.budget_s, self._options.step_timeout_s
        allowed_s = 2 * limit_s + _PROFILE_SLACK * seconds + _PROBES_S
        try:
            world.ask_of(ORIGINAL, world.witnesses, "block", 1, timeout_s=limit_s)  # a step that hangs shows here
            profile, *_ = world.ask(
                world.witnesses, "profile", seconds, timeout_s=allowed_s, blame=Reason.ORIGINAL_FAILS
            )
        except TrialError as error:
            if not error.survived:
                raise
            self._tell("profile", f"not measured: {error.detail}")  # if the original fails, that will show again
            return self._clock("profile", since)
        self._tell("profile", "planning by what was measured")
        self._contest = Contest(self.order.plan_anew(profile))
        return self._clock("profile", since)

    def _race(self, world: World, deadline: float) -> Race:
        limit_s, expected_s = self._options.step_timeout_s, 0.0
        world.reset(limit_s)
        (samples,) = world.ask(world.trainers[:1], "samples_per_step", timeout_s=limit_s)
        begin = time.monotonic()

        def run(arm: Arm, steps: int) -> float:
            nonlocal expected_s
            allowed_s = limit_s + _BLOCK_SLACK * expected_s
            longest_s: float = max(world.ask_of(arm, world.trainers, "block", steps, timeout_s=allowed_s))
            expected_s = max(expected_s, 2 * longest_s)  # the next block may have twice the steps
            return longest_s

        def progress(phase: str, line: str) -> None:
            spent = (time.monotonic() - begin) / max(deadline - begin, 1e-9)
            self._tell(phase, line, min(1.0, spent))

        return Race(
            run,
            self._contest,
            self._options,
            samples_per_step=samples * len(world.trainers),
            deadline=deadline,
            recover=lambda: world.reset(limit_s),
            progress=progress,
        )

    def _timelines(self, world: World, speed: Speed) -> tuple[list[Timeline], list[Timeline]]:
        steps = _recorded_steps(speed, self._options.budget_s)
        limit_s = self._options.step_timeout_s * steps
        original, candidate = (
            world.ask_of(arm, world.witnesses, "timelines", steps, timeout_s=limit_s)[0]
            for arm in (ORIGINAL, speed.candidate)
        )
        return original, candidate


def _recorded_steps(speed: Speed, budget_s: float) -> int:
    """Return how many steps of each arm to record: few where they take long, or where nothing is known of them."""
    if not speed.pairs:
        return 1
    both_s = sum(sum(seconds) for seconds in speed.seconds.values()) / (speed.pairs * speed.steps)
    return max(1, min(_RECORDED_STEPS, int(_RECORDING_SHARE * budget_s / both_s)))


def _with_timelines(report: Report, before: Sequence[Timeline], after: Sequence[Timeline]) -> Report:
    return replace(
        report,
        timeline_original=_typical(before),
        timeline_optimized=_typical(after),
        calls=_with_exposure(report.calls, before, after),
    )


def _with_speed(report: Report, speed: Speed) -> Report:
    if not speed.pairs:
        return report
    return replace(
        report,
        qps_original=speed.qps(ORIGINAL),
        qps_optimized=speed.qps(speed.candidate),
        gain=speed.gain,
        blocks=2 * speed.pairs,
    )


def _typical(timelines: Sequence[Timeline]) -> Timeline:
    """Return the step of median length."""
    return sorted(timelines, key=lambda timeline: timeline.step_s)[len(timelines) // 2]


def _with_exposure(
    calls: Sequence[CallReport], before: Sequence[Timeline], after: Sequence[Timeline]
) -> tuple[CallReport, ...]:
    exposed_before, exposed_after = [exposed_s(each) for each in before], [exposed_s(each) for each in after]
    step_s = fmean(each.step_s for each in after)
    return tuple(
        _explained(
            replace(
                call,
                exposed_before_s=fmean(each.get(call.node, 0.0) for each in exposed_before),
                exposed_after_s=fmean(each.get(call.node, 0.0) for each in exposed_after),
            ),
            step_s,
        )
        for call in calls
    )


def _explained(call: CallReport, step_s: float) -> CallReport:
    """Say so where much of the step is spent in a call of which the cost model expects no such thing."""
    unforeseen = call.limited_by is None and (call.exposed_after_s or 0.0) > _MUCH * step_s
    return replace(call, limited_by=Reason.LIMITED_BEYOND_MODEL) if unforeseen else call


def note_of(share: float) -> tuple[str, ...]:
    """Say, where it is worth a word, that a trainer waited for so large a share of the measured time."""
    if share < NOTEWORTHY:
        return ()
    told = f"cores were shared: a trainer waited for one in {share:.0%} of the measured time"
    return (f"{told}, so the gain may be another on a machine of its own",)
