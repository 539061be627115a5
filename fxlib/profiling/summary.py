"""Sum measured steps up in a profile: medians over steps, scaled so that the parts add up to the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from fxlib.analysis.effects.resources import function_name
from fxlib.profiling.disturbance import handling_s
from fxlib.profiling.samples import CallSample, Forward, PushSample, StepSample
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, Push, Spread


def nodes_of(forwards: Sequence[Forward]) -> tuple[NodeProfile, ...]:
    """Return the local work of each node: its median, scaled so that all of them add up to the median of the whole."""
    seconds = {name: median(each.seconds[name] for each in forwards) for name in forwards[-1].seconds}
    whole_s = median(sum(each.seconds.values()) for each in forwards)
    scale = whole_s / total_s if (total_s := sum(seconds.values())) else 1.0
    sizes = forwards[-1].output_bytes
    return tuple(
        NodeProfile(node=name, seconds=each * scale, output_bytes=sizes[name]) for name, each in seconds.items()
    )


def calls_of(steps: Sequence[StepSample], local: Sequence[StepSample], notes: list[str]) -> tuple[CallProfile, ...]:
    """Return every call, with the push of its gradient if there is one; `local` tells when that is ready."""
    forwards = [forward for step in steps for forward in step.forwards]
    pushes, ready = _pushes(steps), _pushes(local)
    return tuple(
        _ready(
            _call(
                name,
                [forward.calls[name] for forward in forwards if name in forward.calls],
                pushes.get(name, []),
                notes,
            ),
            [each.ready_s or 0.0 for each, _ in ready.get(name, [])],
        )
        for name in forwards[-1].calls
    )


def least_share(local: Sequence[StepSample], further: Sequence[StepSample]) -> float:
    """Return the least time of each part of the local work, as a share of what that part usually takes in `local`."""
    names = local[0].forwards[0].seconds

    def parts(steps: Sequence[StepSample]) -> list[list[float]]:
        of_nodes = [[each.seconds[name] for step in steps for each in step.forwards] for name in names]
        of_phases = [[step.spans_s[kind] for step in steps] for kind in ("loss", "backward")]
        return [*of_nodes, *of_phases, [step.rest_s for step in steps]]

    usual_s = sum(map(median, parts(local)))
    least_s = sum(map(min, parts([*local, *further])))
    return min(1.0, least_s / usual_s) if usual_s and least_s else 1.0


def waking(calls: Sequence[CallProfile], missing_s: float) -> tuple[CallProfile, ...]:
    """Divide among the calls what a step takes longer than its parts: the program waits once in each call."""
    wake_s = max(0.0, missing_s / len(calls)) if calls else 0.0
    return tuple(replace(call, wake_s=wake_s) for call in calls)


def _call(
    name: str, samples: Sequence[CallSample], pushes: Sequence[tuple[PushSample, float | None]], notes: list[str]
) -> CallProfile:
    last = samples[-1]
    if any(each.returns != last.returns for each in samples):
        notes.append(f"{name}: what it returns differs from step to step; the last one is kept")
    if not last.told:
        notes.append(f"{name}: what it returns is not only tensors, numbers and text; the rest cannot be replayed")
    issues_s, waits_s = handling_s(samples)
    call = CallProfile(
        call=name,
        function=function_name(last.node),
        to=last.to,
        request_bytes=round(median(each.request_bytes for each in samples)),
        response_bytes=round(median(each.response_bytes for each in samples)),
        returns=Opaque() if last.returns is None else last.returns,
        issue_s=median(issues_s),
        wait_s=median(waits_s),
        service_s=Spread.of([each.service_s for each in samples]),
    )
    return call if not pushes else _with_push(call, pushes)


def _with_push(call: CallProfile, pushes: Sequence[tuple[PushSample, float | None]]) -> CallProfile:
    """Add the push of a call's gradient; where none was sent, its cost is taken from the call."""
    last = pushes[-1][0]
    own_s = call.issue_s + call.wait_s
    sent = [max(0.0, seconds - own_s) for _, seconds in pushes if seconds is not None]
    push = Push(
        function=last.function,
        request_bytes=last.request_bytes,
        issue_s=call.issue_s,
        service_s=Spread.of(sent) if sent else call.service_s,
        ready_s=median(each.ready_s or 0.0 for each, _ in pushes),
    )
    return replace(call, push=push)


def _ready(call: CallProfile, ready_s: Sequence[float]) -> CallProfile:
    if call.push is None or not ready_s:
        return call
    return replace(call, push=replace(call.push, ready_s=median(ready_s)))


def _pushes(steps: Iterable[StepSample]) -> dict[str, list[tuple[PushSample, float | None]]]:
    """Return the push sample of each call's gradient in each step, with the seconds of its push if one was made."""
    found: dict[str, list[tuple[PushSample, float | None]]] = {}
    for step in steps:
        due = [
            push
            for forward in step.forwards
            for push in sorted(forward.pushes, key=lambda each: each.index)
            if push.ready_s is not None
        ]
        made: Sequence[float | None] = step.pushed_s if len(step.pushed_s) == len(due) else [None] * len(due)
        for push, seconds in zip(due, made, strict=True):
            found.setdefault(push.call, []).append((push, seconds))
    return found
