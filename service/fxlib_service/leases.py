"""The deadlines of leases, in memory and on the monotonic clock; the store knows only who holds which job.

A restart therefore grants every running job a whole new lease, which its worker extends with the next heartbeat. A step
of the wall clock ends no lease, and a heartbeat costs no write.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A worker's hold on a job. The token proves it, if it comes from `principal`, the caller that it was given to."""

    job_id: str
    token: str
    worker_id: str
    principal: str = ""


class Leases:
    """The deadline of each running job's lease.

    Args:
        duration_s: length of a lease, in seconds.
        clock: returns the time, in seconds.
    """

    def __init__(self, *, duration_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.duration_s = duration_s
        self._clock = clock
        self._live: dict[str, tuple[Lease, float]] = {}

    def grant(self, lease: Lease) -> None:
        """Start a lease, or restart its time."""
        self._live[lease.job_id] = lease, self._clock() + self.duration_s

    def extend(self, job_id: str, token: str) -> Lease | None:
        """Restart the time of a job's lease, and return it; None if the job is not leased under this token."""
        lease, _ = self._live.get(job_id, (None, 0.0))
        if lease is None or lease.token != token:
            return None
        self.grant(lease)
        return lease

    def holder(self, job_id: str) -> str:
        """Return the name of the caller that holds a job's lease; "" without a lease or a name."""
        lease, _ = self._live.get(job_id, (None, 0.0))
        return lease.principal if lease is not None else ""

    def holds(self, token: str) -> bool:
        """Whether a lease under this token is live."""
        return bool(token) and any(secrets.compare_digest(lease.token, token) for lease, _ in self._live.values())

    def end(self, job_id: str) -> None:
        """Forget the job's lease, if there is one."""
        self._live.pop(job_id, None)

    def postpone(self, seconds: float) -> None:
        """Move all deadlines back: time for which the service itself stood still does not count against workers."""
        self._live = {job_id: (lease, deadline + seconds) for job_id, (lease, deadline) in self._live.items()}

    def take_expired(self) -> list[Lease]:
        """Remove and return the leases whose deadline has passed."""
        now = self._clock()
        expired = [lease for lease, deadline in self._live.values() if deadline <= now]
        for lease in expired:
            self.end(lease.job_id)
        return expired
