"""One trial from end to end: processes up, sameness, speed, timelines, and the decision."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from typing import Final

from fxlib.reasons import Reason
from fxlib.result import CallReport, Report, Timeline
from fxlib.runtime import exposed_s
from fxlib.trial import TrialOptions
from fxlib.workload import Workload
from workers.config import TrialSettings
from workers.progress import Tell
from workers.trial.failures import TrialError
from workers.trial.sameness import Sameness, compare
from workers.trial.speed import ARMS, Speed, measure
from workers.trial.trainer import Arm, Material, Trace
from workers.trial.world import FAILS, World

_RECORDED_STEPS: Final = 5
_BLOCK_SLACK: Final = 20
"""A block that takes so many times what it should counts as hung, once a single step's time limit is over, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One trial to run."""

    workload: Workload
    options: TrialOptions
    material: Material


def conduct(
    order: Order, rewrite: Report, settings: TrialSettings, tell: Tell, interrupted: Callable[[], bool]
) -> Report:
    """Run the trial and return the rewrite's report, completed by what the trial found.

    Raises:
        InterruptedTrialError: `interrupted` said so.
    """
    conductor = _Conductor(order, tell)
    try:
        return conductor.run(rewrite, settings, interrupted)
    except TrialError as error:
        return replace(
            rewrite,
            decision="keep_original",
            reason=error.reason,
            explanation=error.reason.sentence(error.detail),
            phase_seconds={**rewrite.phase_seconds, **conductor.phase_seconds},
        )


class _Conductor:
    def __init__(self, order: Order, tell: Tell) -> None:
        self._order = order
        self._options = order.options
        self._tell = tell
        self.phase_seconds: dict[str, float] = {}

    def run(self, rewrite: Report, settings: TrialSettings, interrupted: Callable[[], bool]) -> Report:
        start = time.monotonic()
        self._tell("sameness", "starting trainers and parameter servers")
        with World(self._order.workload, self._order.material, settings, interrupted) as world:
            world.prepare()
            started = self._clock("start", start)
            deadline = started + self._options.budget_s
            same = self._sameness(world)
            checked = self._clock("sameness", started)
            report = replace(rewrite, not_reproduced=same.not_reproduced)
            if same.difference and rewrite.preserves == "bitwise":
                return self._decide(report, Reason.NOT_SAME, same.difference)
            if same.difference:
                declared = f"{same.difference} (the recipe preserves {rewrite.preserves})"
                report = replace(report, not_reproduced=(*same.not_reproduced, declared))
            speed, verdict = self._speed(world, deadline)
            measured = self._clock("qps", checked)
            report = self._with_timelines(report, world)
            self._clock("timeline", measured)
            return self._decide(_with_speed(report, speed), verdict)

    def _clock(self, phase: str, since: float) -> float:
        now = time.monotonic()
        self.phase_seconds[phase] = now - since
        return now

    def _sameness(self, world: World) -> Sameness:
        steps, limit_s = self._options.sameness_steps, self._options.step_timeout_s
        trainer = world.trainers[:1]

        def run(arm: Arm) -> Sequence[Trace]:
            self._tell("sameness", f"running {steps} steps of the {arm}")
            world.ask(trainer, "reset", timeout_s=limit_s, blame=Reason.ORIGINAL_FAILS)
            return [
                world.ask(trainer, "trace", arm, step, timeout_s=limit_s, blame=FAILS[arm])[0] for step in range(steps)
            ]

        return compare(run)

    def _speed(self, world: World, deadline: float) -> tuple[Speed, Reason]:
        limit_s, expected_s = self._options.step_timeout_s, 0.0
        world.ask(world.trainers[:1], "reset", timeout_s=limit_s, blame=Reason.ORIGINAL_FAILS)
        (samples,) = world.ask(world.trainers[:1], "samples_per_step", timeout_s=limit_s)
        begin = time.monotonic()

        def run(arm: Arm, steps: int) -> float:
            nonlocal expected_s
            allowed_s = limit_s + _BLOCK_SLACK * expected_s
            longest_s: float = max(
                world.ask(world.trainers, "block", arm, steps, timeout_s=allowed_s, blame=FAILS[arm])
            )
            expected_s = max(expected_s, 2 * longest_s)  # the next block may have twice the steps
            return longest_s

        def report(speed: Speed) -> None:
            spent = (time.monotonic() - begin) / max(deadline - begin, 1e-9)
            self._tell("qps", _progress(speed), min(1.0, spent))

        speed, verdict = measure(
            run, self._options, deadline=deadline, samples_per_step=samples * len(world.trainers), report=report
        )
        return speed, verdict

    def _with_timelines(self, report: Report, world: World) -> Report:
        limit_s = self._options.step_timeout_s * _RECORDED_STEPS
        recorded: dict[Arm, list[Timeline]] = {}
        for arm in ARMS:
            asked = world.ask(
                world.trainers[:1], "timelines", arm, _RECORDED_STEPS, timeout_s=limit_s, blame=FAILS[arm]
            )
            recorded[arm] = asked[0]
        return replace(
            report,
            timeline_original=_typical(recorded["original"]),
            timeline_optimized=_typical(recorded["candidate"]),
            calls=_with_exposure(report.calls, recorded["original"], recorded["candidate"]),
        )

    def _decide(self, report: Report, reason: Reason, detail: str = "") -> Report:
        return replace(
            report,
            decision="adopt" if reason is Reason.FASTER else "keep_original",
            reason=reason,
            explanation=reason.sentence(detail),
            phase_seconds={**report.phase_seconds, **self.phase_seconds},
        )


def _progress(speed: Speed) -> str:
    gain = speed.gain
    interval = f" ({gain.low:+.1%} to {gain.high:+.1%})" if isfinite(gain.high) else ""
    return f"pair {speed.pairs}: {gain.value:+.1%} QPS{interval}"


def _with_speed(report: Report, speed: Speed) -> Report:
    if not speed.pairs:
        return report
    return replace(
        report,
        qps_original=speed.qps("original"),
        qps_optimized=speed.qps("candidate"),
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
    return tuple(
        replace(
            call,
            exposed_before_s=fmean(each.get(call.node, 0.0) for each in exposed_before),
            exposed_after_s=fmean(each.get(call.node, 0.0) for each in exposed_after),
        )
        for call in calls
    )
