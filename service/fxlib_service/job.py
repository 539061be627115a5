"""A job as the service stores it, and an event of its history. Request and result are large and stored separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fxlib.spec.job import JobFailure


class State(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self not in (State.QUEUED, State.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One accepted request. Times are seconds since the epoch.

    Attributes:
        request_digest: SHA-256 of the request, which distinguishes a repeated call from a reused request id.
        cache_key: SHA-256 that equal requests share; on one kind of hardware they have the same answer.
        where: the labels that a worker must have to get the job.
        fresh: whether it is measured anew; it is neither answered with nor held back for an equal job's result.
        attempts: number of leases granted so far, not counting those that workers gave back.
        token: token of the current or last lease.
        hardware: fingerprint of the machine that the current or last lease went to.
        cached: whether the answer comes from an equal job.
        reusable: whether equal jobs may be given the answer.
        asked_by: name of the authenticated caller that submitted the job.
        asked_from: where that call came from, as gRPC writes it.
        measured_by: authenticated name of the worker that holds or last held the lease; for a cached answer, of the
            worker that measured it.
    """

    id: str
    request_id: str
    request_digest: str
    namespace: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    torch_version: str
    cache_key: str
    fresh: bool = False
    created_at: float
    state: State = State.QUEUED
    phase: str = "queued"
    attempts: int = 0
    worker_id: str = ""
    token: str = ""
    hardware: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    failure: JobFailure | None = None
    cached: bool = False
    reusable: bool = False
    asked_by: str = ""
    asked_from: str = ""
    measured_by: str = ""
    last_sequence: int = 0

    @property
    def just_began(self) -> bool:
        """Whether a worker has just got the job for the first time: it has waited since it was accepted."""
        return self.state is State.RUNNING and self.last_sequence == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a job's history.

    Attributes:
        sequence: number of the event within its job, from 1.
        at: when it happened, in seconds since the epoch.
        state: state of the job after the event.
        phase: phase of the work after the event.
        message: one line for people.
        progress: share of the phase that is done, 0 to 1; negative when unknown.
    """

    sequence: int
    at: float
    state: State
    phase: str
    message: str
    progress: float = -1.0
