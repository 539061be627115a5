"""A job of the service as its client sees it, and the options of its trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from fxlib.errors import WorkloadError
from fxlib.spec.report import LiveFigures, Report

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
TERMINAL: frozenset[State] = frozenset(("succeeded", "failed", "cancelled"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """The address of some bytes: their SHA-256 in lower-case hex, and their size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """Why a job ended without an answer: a code from the service's catalogue, and a sentence."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a job's history. `progress` within the phase is 0 to 1, or None if it is unknown."""

    sequence: int
    at: datetime
    state: State
    phase: str
    message: str
    progress: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The state of a job. `report` and `graph` (the rewritten graph, if there is one) are set once it has succeeded.

    `where` holds the labels that a worker must have to measure the job. `waits_for` says why no worker could take a
    queued job. `variant_graphs` holds the graphs of the workload's variants, by name. `asked_by` and `measured_by` are
    the names that the service's policy gives to whoever submitted the job and to the worker that measured it.
    """

    id: str
    request_id: str = ""
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    waits_for: str = ""
    state: State
    phase: str = ""
    attempts: int = 0
    worker_id: str = ""
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    report: Report | None = None
    graph: Blob | None = None
    variant_graphs: Mapping[str, Blob] = field(default_factory=dict)
    failure: JobFailure | None = None
    cached: bool = False
    last_sequence: int = 0
    asked_by: str = ""
    measured_by: str = ""
    live: LiveFigures | None = None
    """The figures that the launcher last reported from its own steps; None if it never reported any."""

    @property
    def done(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self.state in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Selects the jobs of a listing: those that match every non-empty field and have all of `labels`."""

    namespace: str = ""
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    states: Sequence[State] = ()
    id_prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """One page of a listing, and the token that requests the next page; "" if there is none."""

    jobs: Sequence[Job]
    following: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """How a trial measures and decides.

    Args:
        min_gain: the least relative gain in QPS worth adopting (0.02 is 2%).
        confidence: level of the interval whose lower end is compared with `min_gain`.
        budget_s: wall-clock budget of sameness and QPS measurement together, in seconds.
        sameness_steps: steps whose results are compared bit for bit; with the workload's `accumulation`, at least so
            many that a push and the step behind it are among them.
        step_timeout_s: the longest that one step may take, in seconds; a step that takes longer counts as hung.
        max_relative_error: the largest relative error allowed for the results of passes that do not promise the same
            bits; see `fxlib.utils.compare.relative_error`.

    Raises:
        WorkloadError: a figure is out of range.
    """

    min_gain: float = 0.02
    confidence: float = 0.95
    budget_s: float = 60.0
    sameness_steps: int = 3
    step_timeout_s: float = 60.0
    max_relative_error: float = 1e-4

    def __post_init__(self) -> None:
        """Check the ranges."""
        limits = {
            "min_gain": (0.0 <= self.min_gain <= 10.0, "0 to 10 (0.02 is 2%)"),
            "confidence": (0.5 <= self.confidence <= 0.9999, "0.5 to 0.9999"),
            "budget_s": (1.0 <= self.budget_s <= 86_400.0, "1 to 86400 seconds"),
            "sameness_steps": (1 <= self.sameness_steps <= 1000, "1 to 1000"),
            "step_timeout_s": (0.1 <= self.step_timeout_s <= 3600.0, "0.1 to 3600 seconds"),
            "max_relative_error": (0.0 <= self.max_relative_error <= 1.0, "0 to 1 (0.0001 is one in ten thousand)"),
        }
        for name, (holds, wanted) in limits.items():
            if not holds:
                raise WorkloadError(f"{getattr(self, name)} is not in {wanted}", where=f"TrialOptions.{name}")
