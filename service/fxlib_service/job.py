"""A job as the service keeps it, and one line of its history. Large payloads (request, result) are stored beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """Where a job is in its life."""

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
class Failure:
    """Why a job has no answer: a name for programs and a sentence for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One accepted request. Times are seconds since the epoch.

    Attributes:
        request_digest: SHA-256 of the request, to tell a repeated call from a reused id.
        cache_key: requests with one key have one answer, on one kind of hardware.
        fresh: neither answered from another job's result nor held back while an equal job runs.
        attempts: leases given so far, without those given back.
        token: of the present or last lease.
        hardware: fingerprint of the machine that the present or last lease went to.
        cached: the answer is another job's.
        reusable: the answer holds for equal jobs, too.
        asked_by: name of the authenticated caller that submitted it.
        asked_from: where that call came from, as gRPC writes it.
        measured_by: name of the authenticated caller whose worker has, or last had, the lease; of a cached answer, of
            the one that measured it.
    """

    id: str
    request_id: str
    request_digest: str
    namespace: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
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
    failure: Failure | None = None
    cached: bool = False
    reusable: bool = False
    asked_by: str = ""
    asked_from: str = ""
    measured_by: str = ""
    last_sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a job's history. `sequence` counts from 1; `progress` is of the phase, negative when unknown."""

    sequence: int
    at: float
    state: State
    phase: str
    message: str
    progress: float = -1.0
