"""What one measured step leaves behind, before it is summed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from fxlib.spec.profile import Result


@dataclass(slots=True, kw_only=True)
class CallSample:
    """One call that was alone in flight; times in seconds."""

    node: Node
    """The call's node in the module that is measured: its blocking form, or its issue."""
    to: str
    request_bytes: int
    issue_s: float
    issue_cpu_s: float = 0.0
    """Processor time of the trainer's thread in the issue."""
    service_s: float = 0.0
    wait_s: float = 0.0
    wait_cpu_s: float | None = None
    """Processor time of the trainer's thread in the wait; None where that is not told apart from the service."""
    response_bytes: int = 0
    returns: Result | None = None
    told: bool = True
    """Whether `returns` says all of the result but the values of its tensors."""


@dataclass(slots=True, kw_only=True)
class PushSample:
    """One remote result that takes a gradient."""

    call: str
    function: str
    index: int
    """Its place in program order."""
    request_bytes: int
    ready_s: float | None = None
    """Seconds from the start of backward to the arrival of the gradient; None: none arrived."""


@dataclass(slots=True, kw_only=True)
class Forward:
    """One run of the module's code."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of local work, by node."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Processor time of the trainer's thread in the same work."""
    output_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, CallSample] = field(default_factory=dict)
    """Calls by their name as captured."""
    pushes: list[PushSample] = field(default_factory=list)
    graph_s: float = 0.0
    """Seconds from the first node to the last, calls among them."""
    graph_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step."""

    forwards: tuple[Forward, ...]
    step_s: float
    spans_s: Mapping[str, float]
    """Seconds of the step's parts, by the kind of their spans: "loss", "backward", "push"."""
    pushed_s: tuple[float, ...]
    """Seconds of each push that the step made, in order."""
    step_cpu_s: float = 0.0
    """Processor time of the trainer's thread in the step, and in its parts."""
    spans_cpu_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def rest_s(self) -> float:
        """Seconds of the step besides its forwards' nodes, the loss, backward and the pushes."""
        parts = sum(each.graph_s for each in self.forwards) + sum(self.spans_s.values())
        return max(0.0, self.step_s - parts)
