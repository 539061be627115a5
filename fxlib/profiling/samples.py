"""The measurements of one step, before a profile sums them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from fxlib.spec.profile import Result


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
    """Seconds of processor time that the trainer's thread spent in the wait; None where that is not known."""
    response_bytes: int = 0
    returns: Result | None = None
    told: bool = True
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
    """Seconds from the start of backward to the arrival of the gradient; None: none arrived."""


@dataclass(slots=True, kw_only=True)
class Forward:
    """One run of the module's code."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of local work, by node."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time that the trainer's thread spent in the same work, by node."""
    output_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, CallSample] = field(default_factory=dict)
    """The calls, by their name as captured."""
    pushes: list[PushSample] = field(default_factory=list)
    graph_s: float = 0.0
    """Seconds from the first node to the last, calls among them."""
    graph_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """The measurements of one step."""

    forwards: tuple[Forward, ...]
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
        """Seconds of the step besides its forwards' nodes, the loss, backward and the pushes."""
        parts = sum(each.graph_s for each in self.forwards) + sum(self.spans_s.values())
        return max(0.0, self.step_s - parts)
