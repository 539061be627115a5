"""The measurements of single steps, before a profile summarizes them, and their correction for other processes.

While another process has the trainer's core, time passes in which the trainer's thread does nothing. So each piece of
local work counts as the processor time of that thread, plus the least time by which any repetition of it took longer
than that: a delay that every repetition has (sleeping, reading a file, waiting for other threads) is the program's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from fxlib.spec.profile import Result

NOTEWORTHY = 0.1
"""Share of the local work's time above which a profile's notes say that other processes took it."""


@dataclass(slots=True, kw_only=True)
class CallSample:
    """The times of one call that was alone in flight, in seconds."""

    node: Node
    """The call's node in the module that is measured: its blocking form, or its issue."""
    to: str
    request_bytes: int
    issue_s: float
    issue_cpu_s: float = 0.0
    """Seconds of processor time that the trainer's thread spent in the issue."""
    service_s: float = 0.0
    wait_s: float = 0.0
    wait_cpu_s: float | None = None
    """Seconds of processor time that the trainer's thread spent in the wait; None if unknown."""
    response_bytes: int = 0
    returns: Result | None = None
    is_complete: bool = True
    """Whether `returns` describes all of the result except the values of its tensors."""


@dataclass(slots=True, kw_only=True)
class PushSample:
    """One remote result that takes a gradient."""

    call: str
    function: str
    index: int
    """The call's index in program order."""
    request_bytes: int
    ready_s: float | None = None
    """Seconds from the start of backward to the arrival of the gradient; None if none arrived."""


@dataclass(slots=True, kw_only=True)
class ForwardSample:
    """One run of the module's code."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of local work, by node."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time that the trainer's thread spent in the same work, by node."""
    output_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, CallSample] = field(default_factory=dict)
    """The calls by their name as captured."""
    pushes: list[PushSample] = field(default_factory=list)
    graph_s: float = 0.0
    """Seconds from the first node to the last, calls included."""
    graph_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """The measurements of one step."""

    forwards: tuple[ForwardSample, ...]
    step_s: float
    spans_s: Mapping[str, float]
    """Seconds of each part of the step, by the kind of its span: "loss", "backward", "push"."""
    pushed_s: tuple[float, ...]
    """Seconds of each push that the step made, in order."""
    step_cpu_s: float = 0.0
    """Seconds of processor time that the trainer's thread spent in the step, its parts included."""
    spans_cpu_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def rest_s(self) -> float:
        """Seconds of the step besides the nodes of its forwards, the loss, backward and the pushes."""
        parts = sum(each.graph_s for each in self.forwards) + sum(self.spans_s.values())
        return max(0.0, self.step_s - parts)


def own_s(passed_s: Sequence[float], cpu_s: Sequence[float]) -> list[float]:
    """Return how long each repetition of one piece of work would have taken if no other process had taken its core."""
    idle_s = max(0.0, min((each - own for each, own in zip(passed_s, cpu_s, strict=True)), default=0.0))
    return [min(each, own + idle_s) for each, own in zip(passed_s, cpu_s, strict=True)]


def undisturbed(steps: Sequence[StepSample]) -> tuple[list[StepSample], float]:
    """Return steps corrected for other processes, and the share of their local work that these processes took."""
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
        own, backward_s = list[ForwardSample](), step.spans_s["backward"]
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
    timed = [each for each in samples if each.wait_cpu_s is not None]
    waits = own_s([each.wait_s for each in timed], [each.wait_cpu_s or 0.0 for each in timed])
    return issues, waits or [each.wait_s for each in samples]


def services_s(samples: Sequence[CallSample]) -> list[float]:
    """Return the seconds that a call took besides its issue until its answer was there, each time it was made.

    A server works while another process has the core of an issue that has sent its message: that time is the server's.
    """
    issues_s, _ = handling_s(samples)
    return [each.issue_s + each.service_s - own for each, own in zip(samples, issues_s, strict=True)]


def _rest_cpu_s(step: StepSample) -> float:
    parts_s = sum(each.graph_cpu_s for each in step.forwards) + sum(step.spans_cpu_s.values())
    return max(0.0, min(step.step_cpu_s - parts_s, step.rest_s))
