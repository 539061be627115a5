"""The deadlines of leases; the store records who holds which job.

If one service owns the store, deadlines are kept in its memory, by the monotonic clock. A restart therefore grants
every running job a full new lease, which its worker extends with the next heartbeat. A jump of the wall clock ends no
lease, and a heartbeat costs no write. If several services share a database, deadlines are kept there
(`shared_database`).
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A worker's hold on a job. Its token proves it, provided that it comes from `principal`, to whom it was given."""

    job_id: str
    token: str
    worker_id: str
    principal: str = ""


class Leases(ABC):
    """The deadline of each running job's lease.

    Attributes:
        duration_s: length of a lease, in seconds.
    """

    duration_s: float

    @abstractmethod
    def grant(self, lease: Lease) -> None:
        """Start a lease whose claim is stored, or restart its time."""

    @abstractmethod
    async def extend(self, job_id: str, token: str) -> Lease | None:
        """Restart the time of a job's lease, and return it; None if the job is not leased under this token."""

    @abstractmethod
    async def holder(self, job_id: str) -> str:
        """Return the name of the caller that holds a job's lease; "" without a lease or a name."""

    @abstractmethod
    async def holds(self, token: str) -> bool:
        """Return whether a lease under this token is live."""

    @abstractmethod
    def end(self, job_id: str) -> None:
        """Forget the job's lease, if there is one; its end is already stored."""

    @abstractmethod
    def postpone(self, seconds: float) -> None:
        """Postpone all deadlines: time for which the service itself stood still does not count against workers."""

    @abstractmethod
    async def take_expired(self) -> Sequence[Lease]:
        """Return the leases whose deadline has passed, each only once; the caller ends them."""


class MemoryLeases(Leases):
    """Leases in the memory of a service that owns its store.

    Args:
        duration_s: length of a lease, in seconds.
        clock: returns the time, in seconds.
    """

    def __init__(self, *, duration_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.duration_s = duration_s
        self._clock = clock
        self._live: dict[str, tuple[Lease, float]] = {}

    @override
    def grant(self, lease: Lease) -> None:
        self._live[lease.job_id] = lease, self._clock() + self.duration_s

    @override
    async def extend(self, job_id: str, token: str) -> Lease | None:
        lease, _ = self._live.get(job_id, (None, 0.0))
        if lease is None or lease.token != token:
            return None
        self.grant(lease)
        return lease

    @override
    async def holder(self, job_id: str) -> str:
        lease, _ = self._live.get(job_id, (None, 0.0))
        return lease.principal if lease is not None else ""

    @override
    async def holds(self, token: str) -> bool:
        return bool(token) and any(secrets.compare_digest(lease.token, token) for lease, _ in self._live.values())

    @override
    def end(self, job_id: str) -> None:
        self._live.pop(job_id, None)

    @override
    def postpone(self, seconds: float) -> None:
        self._live = {job_id: (lease, deadline + seconds) for job_id, (lease, deadline) in self._live.items()}

    @override
    async def take_expired(self) -> list[Lease]:
        now = self._clock()
        expired = [lease for lease, deadline in self._live.values() if deadline <= now]
        for lease in expired:
            self.end(lease.job_id)
        return expired
