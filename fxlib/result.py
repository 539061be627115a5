"""The answer of an optimization: the module, the decision, and the figures and reasons behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch.fx import GraphModule

from fxlib.reasons import Declined, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval of a step, seconds from the step's start."""

    kind: str
    name: str
    to: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of one trainer."""

    spans: tuple[Span, ...]
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """What became of one remote call. Exposed time: how long per step the trainer's thread stood blocked in it."""

    node: str
    function: str
    to: str
    action: Literal["moved", "merged", "left_alone"]
    reason: Reason
    detail: str = ""
    remedy: str = ""
    source: str = ""
    exposed_before_s: float | None = None
    exposed_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass did: changes made, seconds taken, and what it declined, with reasons."""

    name: str
    changes: int
    seconds: float
    declined: tuple[Declined, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer to `client.optimize`. `module` is ready to train: rewritten if `decision` is "adopt", else the original."""

    module: GraphModule
    decision: Literal["adopt", "keep_original"]
    reason: Reason | None
    explanation: str
    job_id: str = ""
    qps_original: Estimate | None = None
    qps_optimized: Estimate | None = None
    gain: Estimate | None = None
    calls: tuple[CallReport, ...] = ()
    passes: tuple[PassReport, ...] = ()
    not_reproduced: tuple[str, ...] = ()
    preserves: str = "bitwise"
    assumptions: tuple[str, ...] = ()
    timeline_original: Timeline | None = None
    timeline_optimized: Timeline | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)
    hardware: str = ""
    cached: bool = False
