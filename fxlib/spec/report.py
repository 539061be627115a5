"""The answer of an optimization: the module, the decision, and the figures and reasons behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from typing import Any, Literal

from torch import nn

from fxlib.reasons import Declined, Reason

Decision = Literal["adopt", "keep_original"]
Action = Literal["moved", "merged", "left_alone"]


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
    action: Action
    reason: Reason
    detail: str = ""
    remedy: str = ""
    source: str = ""
    exposed_before_s: float | None = None
    exposed_after_s: float | None = None
    limited_by: Reason | None = None
    """What keeps the rest of its time exposed; None where nothing does, or nobody knows."""
    limit_detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undeclared:
    """What one remote function, or several together, would be worth if their contracts said that they only read."""

    functions: tuple[str, ...]
    """Names of the functions; more than one in one entry: all that declare nothing."""
    calls: int
    """How often the program calls them."""
    gain: float
    """Gain that the cost model expects over the plan without these contracts (0.48: 48% more samples per second)."""
    remedy: str = ""
    """The declaration, ready to be pasted."""
    measured: bool = True
    """Whether by a profile of the program; else the gain is the forward's, by estimates."""

    def __str__(self) -> str:
        """One line."""
        several = len(self.functions) > 1
        who = f"all {len(self.functions)} undeclared functions" if several else self.functions[0]
        how = "" if self.measured else " of the forward, by estimates: there is no profile"
        text = f"{who} ({self.calls} call{'s' * (self.calls != 1)}): with reads=: {self.gain:+.0%} expected{how}"
        return f"{text} ({self.remedy})" if self.remedy else text


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass did: changes made, seconds taken, and what it declined, with reasons."""

    name: str
    changes: int
    seconds: float
    declined: tuple[Declined, ...] = ()
    diff: str = ""
    """The generated code before and after it, as a unified diff; only where it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One of the programs among which a worker chose: what the cost model expected of it, and what was measured."""

    name: str
    predicted_step_s: float | None = None
    gain: Estimate | None = None
    """Over the original, as far as it was measured; the one chosen was then confirmed on fresh blocks."""
    verdict: str = ""
    """What became of it, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How often each graph of a module ran, by its name ("main": its own), and its original, by the reason."""

    graphs: Mapping[str, int] = field(default_factory=dict)
    original: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker found out about one job: everything in a `Result` but the module itself.

    QPS are samples per second; `gain` is relative (0.10: 10% more samples per second). `explanation` says in a
    sentence what `reason` names. `not_reproduced` names what the original does not reproduce of itself, and so was
    left out of *bitwise*; `assumptions` are statements taken on the user's word.
    """

    decision: Decision
    reason: Reason | None
    explanation: str
    qps_original: Estimate | None = None
    qps_optimized: Estimate | None = None
    gain: Estimate | None = None
    calls: tuple[CallReport, ...] = ()
    passes: tuple[PassReport, ...] = ()
    not_reproduced: tuple[str, ...] = ()
    preserves: str = "bitwise"
    max_relative_error: float | None = None
    """How far results were from the original's, see `utils.compare`; 0: the same bits. None: it was not measured."""
    assumptions: tuple[str, ...] = ()
    timeline_original: Timeline | None = None
    timeline_optimized: Timeline | None = None
    timeline_bound: Timeline | None = None
    """The step as it would run at the bound, by the cost model."""
    bound_s: float | None = None
    """Seconds per step that no schedule can beat, by the cost model."""
    candidates: tuple[Candidate, ...] = ()
    undeclared: tuple[Undeclared, ...] = ()
    """Remote functions that declare nothing, and what the cost model expects of declaring them; most first."""
    notes: tuple[str, ...] = ()
    """What whoever reads the figures has to know: that cores were shared while they were measured."""
    blocks: int = 0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    hardware: str = ""
    torch_version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it but the module as plain data, which `json` can write, under the names of the attributes.

        Reasons are their names ("FASTER"); what is unknown is None.
        """
        return {each.name: plain(getattr(self, each.name)) for each in fields(self) if each.name != "module"}

    variants: Mapping[str, Report] = field(default_factory=dict)
    """What was found out about each variant of the workload, by its name; each has a decision of its own."""

    @property
    def adopts(self) -> bool:
        """Whether the rewritten graph of the workload's own step, or that of a variant, is to be adopted."""
        return any(each.decision == "adopt" for each in (self, *self.variants.values()))

    def __str__(self) -> str:
        """Lay everything out as plain text, for a person."""
        from fxlib.spec.report_text import render

        return render(self)


def plain(value: object) -> Any:
    """Return dataclasses as dicts, sequences as lists, reasons by name, times as ISO 8601, and the rest as it is."""
    if isinstance(value, Reason):
        return value.name
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return value


@dataclass(frozen=True, kw_only=True)
class Result(Report):
    """The answer to `client.optimize`, with a `module` that is ready to train.

    It is the rewritten one if `decision` is "adopt", else the original. Where variants of the workload are adopted, it
    runs their graphs for the calls that these fit, whatever `decision` says of the workload's own step.
    `reason` is None where the job never got an answer (no service, no time); `explanation` then says what happened.
    """

    module: nn.Module
    job_id: str = ""
    cached: bool = False

    @classmethod
    def of(cls, report: Report, *, module: nn.Module, job_id: str, cached: bool) -> Result:
        """Join a worker's report with the module that it speaks of."""
        told = {each.name: getattr(report, each.name) for each in fields(Report)}
        return cls(**told, module=module, job_id=job_id, cached=cached)

    @classmethod
    def original(cls, module: nn.Module, explanation: str, *, job_id: str = "") -> Result:
        """Keep the original, because the service gave no answer."""
        return cls(module=module, decision="keep_original", reason=None, explanation=explanation, job_id=job_id)

    @property
    def usage(self) -> Usage:
        """How often each graph of `module` has run by now, and the original, and why."""
        companions = self.module.__dict__.get("_fxlib")
        return Usage() if companions is None else companions.graphs.usage()

    @property
    def adopted(self) -> bool:
        """Whether `module` is a rewritten one, or runs a rewritten graph for some calls."""
        return self.adopts
