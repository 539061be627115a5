"""A job of the service, as its client sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from fxlib.result import Report

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
TERMINAL: frozenset[State] = frozenset(("succeeded", "failed", "cancelled"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes by their address: SHA-256 in lower-case hex, and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a job ended without an answer: a code of the service's catalogue, and a sentence."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a job's history. `progress` of the phase is 0 to 1, or None when unknown."""

    sequence: int
    at: datetime
    state: State
    phase: str
    message: str
    progress: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's state. `report` and `graph` (the rewritten one, when there is one) are set when it succeeded."""

    id: str
    request_id: str = ""
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    state: State
    phase: str = ""
    attempts: int = 0
    worker_id: str = ""
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    report: Report | None = None
    graph: Blob | None = None
    failure: Failure | None = None
    cached: bool = False
    last_sequence: int = 0

    @property
    def done(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self.state in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """How a trial measures and decides.

    Args:
        min_gain: the least relative gain in QPS worth adopting (0.02 is 2%).
        confidence: level of the interval whose lower end is compared with `min_gain`.
        budget_s: wall-clock budget of sameness and QPS measurement together, in seconds.
        sameness_steps: steps whose results are compared bit for bit.
        step_timeout_s: the longest that one step may take, in seconds; a longer one counts as hung.

    Raises:
        WorkloadError: a figure is out of its range.
    """

    min_gain: float = 0.02
    confidence: float = 0.95
    budget_s: float = 60.0
    sameness_steps: int = 3
    step_timeout_s: float = 60.0
