"""The time that other processes took from measured steps, and the steps as they are without it.

While another process has the trainer's core, time passes in which the trainer's thread does nothing. So each piece of
local work counts as the processor time of that thread, plus the least time by which any repetition of it took longer
than that: a delay that every repetition has (sleeping, reading a file, waiting for other threads) is the program's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxlib.profiling.samples import CallSample, Forward, StepSample

NOTEWORTHY = 0.1
"""The share of the local work's time from which on a profile's notes say that other processes took it."""


def own_s(passed_s: Sequence[float], cpu_s: Sequence[float]) -> list[float]:
    """Return how long each repetition of one piece of work would have taken had no other process taken its core.

    Args:
        passed_s: seconds that passed.
        cpu_s: processor time of the thread in them, one for each.
    """
    idle_s = max(0.0, min((each - own for each, own in zip(passed_s, cpu_s, strict=True)), default=0.0))
    return [min(each, own + idle_s) for each, own in zip(passed_s, cpu_s, strict=True)]


def undisturbed(steps: Sequence[StepSample]) -> tuple[list[StepSample], float]:
    """Return steps as they are without other processes, and the share of their local work that these took."""
    if not steps or any(len(step.forwards) != len(steps[0].forwards) for step in steps):
        return list(steps), 0.0
    forwards = [forward for step in steps for forward in step.forwards]
    columns = {
        name: own_s([f.seconds[name] for f in forwards], [f.cpu_s[name] for f in forwards])
        for name in forwards[0].seconds
    }
    phases = {
        kind: own_s([step.spans_s[kind] for step in steps], [step.spans_cpu_s.get(kind, 0.0) for step in steps])
        for kind in ("loss", "backward")
    }
    rest = own_s([step.rest_s for step in steps], [_rest_cpu_s(step) for step in steps])
    passed_s = sum(sum(each.seconds.values()) for each in forwards)
    passed_s += sum(step.spans_s["loss"] + step.spans_s["backward"] + step.rest_s for step in steps)
    kept_s = sum(map(sum, columns.values())) + sum(map(sum, phases.values())) + sum(rest)
    made, at = list[StepSample](), 0
    for number, step in enumerate(steps):
        own, backward_s = list[Forward](), step.spans_s["backward"]
        quicker = phases["backward"][number] / backward_s if backward_s else 1.0
        for forward in step.forwards:
            seconds = {name: column[at] for name, column in columns.items()}
            less_s = sum(forward.seconds.values()) - sum(seconds.values())
            pushes = [replace(each, ready_s=each.ready_s and quicker * each.ready_s) for each in forward.pushes]
            graph_s = max(0.0, forward.graph_s - less_s)
            own.append(replace(forward, seconds=seconds, pushes=pushes, graph_s=graph_s))
            at += 1
        spans_s = {**step.spans_s, **{kind: column[number] for kind, column in phases.items()}}
        whole_s = sum(each.graph_s for each in own) + sum(spans_s.values()) + rest[number]
        made.append(replace(step, forwards=tuple(own), spans_s=spans_s, step_s=whole_s))
    return made, max(0.0, 1.0 - kept_s / passed_s) if passed_s else 0.0


def handling_s(samples: Sequence[CallSample]) -> tuple[list[float], list[float]]:
    """Return the seconds that issuing a call and waiting for it took the trainer's thread, each time it was made."""
    issues = own_s([each.issue_s for each in samples], [each.issue_cpu_s for each in samples])
    told = [each for each in samples if each.wait_cpu_s is not None]
    waits = own_s([each.wait_s for each in told], [each.wait_cpu_s or 0.0 for each in told])
    return issues, waits or [each.wait_s for each in samples]


def _rest_cpu_s(step: StepSample) -> float:
    parts_s = sum(each.graph_cpu_s for each in step.forwards) + sum(step.spans_cpu_s.values())
    return max(0.0, min(step.step_cpu_s - parts_s, step.rest_s))
