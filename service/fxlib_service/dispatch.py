"""Jobs to workers and answers back: claims, leases, and what happens when a worker falls silent."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from fxlib_service.background import Background
from fxlib_service.errors import Code, ServiceError
from fxlib_service.job import Job, State
from fxlib_service.leases import Lease, Leases
from fxlib_service.ledger import Ledger
from fxlib_service.lifecycle import Claimed, Completed, Failed, LeaseExpired, Released, Reported, Transition
from fxlib_service.stores.base import Head, Worker
from fxlib_service.workers import Workers

_SWEEP_S: Final = 0.5
_LATE_S: Final = 1.0
_REMEMBERED_NAMESPACES: Final = 1_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A claimed job, under the lease that its token names, and the request that it was made for."""

    job: Job
    request: bytes


class Waiter:
    """One worker that waits."""

    def __init__(self) -> None:
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.looked = False

    async def wait(self, timeout_s: float) -> bool:
        """Wait to be woken, and then look; False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self.woken)
        except TimeoutError:
            return False
        self.looked = True
        return True


class Wakeups:
    """The workers that wait for jobs of one kind.

    A worker registers first (`waiting`), looks for a job, then waits: a job that is queued after the look wakes it. A
    worker that was woken and leaves without looking wakes the next one.
    """

    def __init__(self) -> None:
        self._waiting: deque[Waiter] = deque()

    def wake_one(self) -> None:
        """Wake the worker that has waited longest."""
        if self._waiting:
            self._waiting.popleft().woken.set_result(None)

    def wake_all(self) -> None:
        """Wake all workers."""
        while self._waiting:
            self.wake_one()

    @contextmanager
    def waiting(self) -> Iterator[Waiter]:
        """Register a waiter for the length of the block."""
        waiter = Waiter()
        self._waiting.append(waiter)
        try:
            yield waiter
        finally:
            with suppress(ValueError):
                self._waiting.remove(waiter)
            if waiter.woken.done() and not waiter.looked:
                self.wake_one()


class Dispatcher:
    """Who works on what. Fair: the namespace that runs least is served first, then the one served longest ago."""

    def __init__(
        self, ledger: Ledger, workers: Workers, leases: Leases, background: Background, on_expiry: Callable[[], None]
    ) -> None:
        self._ledger = ledger
        self._workers = workers
        self.leases = leases
        self._background = background
        self._on_expiry = on_expiry
        self._wakeups: defaultdict[str, Wakeups] = defaultdict(Wakeups)
        self._served: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._closed = False

    async def recover(self) -> None:
        """Grant every running job a new lease: its worker may be well, and could not reach the service."""
        for job in await self._ledger.read(self._ledger.store.running):
            self.leases.grant(Lease(job_id=job.id, token=job.token, worker_id=job.worker_id, principal=job.measured_by))

    def heard(self, transition: Transition) -> None:
        """Wake a worker when a job is there to be claimed: this one, or one that stood behind it."""
        job = transition.job
        if job.state is not State.RUNNING:
            self.leases.end(job.id)
            self._wakeups[job.torch_version].wake_one()

    def check_holder(self, job_id: str, principal: str) -> None:
        """Refuse a caller other than the one that a job is leased to, whatever token it shows.

        Raises:
            ServiceError: LEASE_LOST.
        """
        if self.leases.holder(job_id) not in ("", principal):
            raise ServiceError(Code.LEASE_LOST, f"job {job_id} is not leased under this token")

    async def claim(self, worker: Worker, *, wait_s: float, principal: str = "") -> Grant | None:
        """Return a job under a lease, waiting for one up to `wait_s`; None if there was none."""
        await self._workers.see(worker)
        wakeups, deadline = self._wakeups[worker.torch_version], time.monotonic() + wait_s
        while True:
            with wakeups.waiting() as waiter:
                grant = await self._claim_surely(worker, principal)
                if grant is not None:
                    wakeups.wake_one()  # where there was one, there may be more
                    return grant
                if self._closed or not await waiter.wait(deadline - time.monotonic()):
                    return None

    async def heartbeat(self, job_id: str, token: str) -> bool:
        """Keep a lease alive; False if the job was cancelled.

        Raises:
            ServiceError: JOB_NOT_FOUND or LEASE_LOST.
        """
        lease = self.leases.extend(job_id, token)
        if lease is not None:
            self._workers.touch(lease.worker_id)
            return True
        job = await self._ledger.get(job_id)
        if job.token == token and job.state is State.CANCELLED:
            return False
        raise ServiceError(Code.LEASE_LOST, f"job {job_id} is not leased under this token")

    async def tell(self, job_id: str, said: Reported | Completed | Failed | Released) -> Transition:
        """Act on what a worker says about its job; to say anything keeps the lease alive.

        Raises:
            ServiceError: JOB_NOT_FOUND or LEASE_LOST.
        """
        lease = self.leases.extend(job_id, said.token)
        if lease is not None:
            self._workers.touch(lease.worker_id)
        return await self._ledger.apply(job_id, said)

    async def complete(self, job_id: str, said: Completed) -> None:
        """Act on a worker's answer; the same answer may come again.

        Raises:
            ServiceError: JOB_NOT_FOUND, or LEASE_LOST, if another answer came before among others.
        """
        transition = await self.tell(job_id, said)
        if transition.event is None and transition.job.state is State.SUCCEEDED:
            stored = await self._ledger.read(self._ledger.store.result_of, job_id)
            if stored != said.result:
                raise ServiceError(Code.LEASE_LOST, f"job {job_id} has ended with another answer")

    async def request_of(self, job_id: str, token: str) -> bytes:
        """Return the request that a job was made for, to whom its last lease was given.

        Raises:
            ServiceError: JOB_NOT_FOUND or LEASE_LOST.
        """
        job = await self._ledger.get(job_id)
        if not job.token or job.token != token:
            raise ServiceError(Code.LEASE_LOST, f"job {job_id} is not leased under this token")
        return await self._ledger.read(self._ledger.store.request_of, job_id)

    async def sweep(self) -> None:
        """Take jobs back from silent workers, until cancelled."""
        while True:
            planned = time.monotonic() + _SWEEP_S
            await asyncio.sleep(_SWEEP_S)
            late = time.monotonic() - planned
            if late > _LATE_S:
                self.leases.forgive(late)
            await self.expire(self.leases.take_expired())

    async def expire(self, leases: Sequence[Lease]) -> None:
        """End leases whose time is over; one that cannot be ended now is tried again later."""
        for lease in leases:
            try:
                await self._ledger.apply(lease.job_id, LeaseExpired(token=lease.token))
            except Exception:
                logger.exception("could not take back job %s", lease.job_id)
                self.leases.grant(lease)
            else:
                self._on_expiry()
                logger.warning("worker %s lost its lease of job %s", lease.worker_id, lease.job_id)

    def close(self) -> None:
        """Send the waiting workers away."""
        self._closed = True
        for wakeups in self._wakeups.values():
            wakeups.wake_all()

    async def _claim_surely(self, worker: Worker, principal: str) -> Grant | None:
        """Claim; a worker that leaves meanwhile gives back what it would have got."""
        attempt = asyncio.ensure_future(self._claim(worker, principal))
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            self._background.entrust(self._give_back(attempt), "giving a job back")
            raise

    async def _give_back(self, attempt: asyncio.Task[Grant | None]) -> None:
        if (grant := await attempt) is not None:
            await self.tell(grant.job.id, Released(token=grant.job.token))

    async def _claim(self, worker: Worker, principal: str) -> Grant | None:
        if self._closed:
            return None
        async with self._turn:
            for head in self._in_order(await self._ledger.read(self._ledger.store.heads, worker.torch_version)):
                token = secrets.token_hex(16)
                lease = Lease(job_id=head.job_id, token=token, worker_id=worker.id, principal=principal)
                claimed = Claimed(worker_id=worker.id, token=token, hardware=worker.hardware, principal=principal)
                job = (await self._ledger.apply(head.job_id, claimed)).job
                if job.token == lease.token:  # else it was cancelled meanwhile
                    self.leases.grant(lease)
                    self._served.pop(head.namespace, None)
                    self._served[head.namespace] = time.monotonic()
                    if len(self._served) > _REMEMBERED_NAMESPACES:
                        del self._served[next(iter(self._served))]
                    return Grant(job=job, request=await self._ledger.read(self._ledger.store.request_of, job.id))
            return None

    def _in_order(self, heads: Sequence[Head]) -> list[Head]:
        return sorted(heads, key=lambda head: (head.running, self._served.get(head.namespace, 0.0), head.number))
