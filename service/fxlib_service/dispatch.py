"""Gives jobs to workers and takes their answers: claims, leases, and the handling of workers that fall silent."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from fxlib.spec.labels import may_run
from fxlib_service.background import Background
from fxlib_service.equal_jobs import EqualJobs
from fxlib_service.errors import Code, ServiceError
from fxlib_service.job import Job, State
from fxlib_service.leases import Lease, Leases
from fxlib_service.ledger import Ledger
from fxlib_service.lifecycle import Claimed, Completed, Failed, LeaseExpired, Released, Reported, Transition
from fxlib_service.stores.base import Worker
from fxlib_service.workers import Workers

_SWEEP_S: Final = 0.5
_LATE_S: Final = 1.0
_AWAY_S: Final = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A job that a worker has claimed, with the serialized request. `job.token` is the token of the lease.

    `others` lists, without repetition, where jobs may run that may be left for the next workers.
    """

    job: Job
    request: bytes
    others: Sequence[Mapping[str, str]] = ()


class Waiter:
    """A worker with these labels that waits for a job. If it was woken, `woken_for` is where that job may run."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        self.woken_for: Mapping[str, str] = {}
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.looked = False

    async def wait(self, timeout_s: float) -> bool:
        """Wait to be woken; return False after `timeout_s` seconds. A worker that was woken looks for a job again."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self.woken)
        except TimeoutError:
            return False
        self.looked = True
        return True


class Wakeups:
    """The workers that wait for jobs of one torch version, woken one at a time in the order in which they came.

    A worker first registers (`waiting`), then looks for a job, then waits, so that a job queued after it looked wakes
    it. A worker that leaves without looking after it was woken wakes the next one.
    """

    def __init__(self) -> None:
        self._waiting: deque[Waiter] = deque()
        self._registered = 0

    @property
    def idle(self) -> bool:
        """Whether no worker is registered, not even one that was woken and has yet to look."""
        return not self._registered

    def wake_one(self, where: Mapping[str, str]) -> None:
        """Wake the worker that has waited longest of those that could take a job that may run `where`."""
        waiter = next((each for each in self._waiting if may_run(where, each.labels)), None)
        if waiter is not None:
            self._waiting.remove(waiter)
            waiter.woken_for = where
            waiter.woken.set_result(None)

    def wake_all(self) -> None:
        """Wake all workers."""
        while self._waiting:
            self._waiting.popleft().woken.set_result(None)

    @contextmanager
    def waiting(self, labels: Mapping[str, str]) -> Iterator[Waiter]:
        """Register a waiter for the duration of the block."""
        waiter = Waiter(labels)
        self._waiting.append(waiter)
        self._registered += 1
        try:
            yield waiter
        finally:
            self._registered -= 1
            with suppress(ValueError):
                self._waiting.remove(waiter)
            if waiter.woken.done() and not waiter.looked:
                self.wake_one(waiter.woken_for)


class Dispatcher:
    """Assigns jobs to workers that may run them.

    The namespace with the fewest running jobs comes first; among equals, the one served longest ago.

    Args:
        ledger: stores what happens to jobs.
        workers: the known workers.
        leases: the deadlines of the running jobs' leases.
        background: finishes a claim whose caller left.
        equal: ends a job in place of handing it out if an equal one has ended since it came.
        on_expiry: is called once for each lease that expired.
    """

    def __init__(
        self,
        ledger: Ledger,
        workers: Workers,
        leases: Leases,
        background: Background,
        *,
        equal: EqualJobs,
        on_expiry: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._workers = workers
        self.leases = leases
        self._background = background
        self._equal = equal
        self._on_expiry = on_expiry
        self._wakeups: dict[str, Wakeups] = {}
        self._turn = asyncio.Lock()
        self._closed = False

    async def recover(self) -> None:
        """Grant every running job a full new lease: its worker may still be at work although the service was down."""
        for job in await self._ledger.read(self._ledger.store.running):
            self._grant(job)

    def heard(self, transition: Transition) -> None:
        """Wake a worker when a job may have become claimable: this one, or an equal one that waited for it.

        The lease of a claim is granted here, since the job's end may be heard before the claim's caller goes on.
        """
        job = transition.job
        if transition.claimed:
            self._grant(job)
        if job.state is not State.RUNNING and not transition.at_once:
            self.leases.end(job.id)
            self.wake(job)

    def wake(self, job: Job) -> None:
        """Wake a worker that could take this job, or one that waited for it."""
        if (wakeups := self._wakeups.get(job.torch_version)) is not None:
            wakeups.wake_one(job.where)

    def wake_all(self) -> None:
        """Wake all waiting workers."""
        for wakeups in self._wakeups.values():
            wakeups.wake_all()

    async def check_holder(self, job_id: str, principal: str) -> None:
        """Refuse every caller except the one that the job is leased to, even if it has the lease's token.

        Raises:
            ServiceError: LEASE_LOST.
        """
        if await self.leases.holder(job_id) not in ("", principal):
            raise ServiceError(Code.LEASE_LOST, f"job {job_id} is not leased under this token")

    async def claim(self, worker: Worker, *, wait_s: float, principal: str = "") -> Grant | None:
        """Lease a job to a worker, waiting up to `wait_s` seconds for one; return None if none came."""
        await self._workers.see(worker, principal)
        deadline = time.monotonic() + wait_s
        while True:
            with self._waiting(worker) as (wakeups, waiter):
                grant = await self._claim_surely(worker, principal)
                if grant is not None:
                    for where in grant.others:
                        wakeups.wake_one(where)
                    return grant
                if self._closed or not await waiter.wait(deadline - time.monotonic()):
                    return None

    @contextmanager
    def _waiting(self, worker: Worker) -> Iterator[tuple[Wakeups, Waiter]]:
        """Register a worker as a waiter in the block. Versions that nobody waits for take no memory."""
        wakeups = self._wakeups.setdefault(worker.torch_version, Wakeups())
        try:
            with wakeups.waiting(worker.labels) as waiter:
                yield wakeups, waiter
        finally:
            if wakeups.idle:
                del self._wakeups[worker.torch_version]

    async def heartbeat(self, job_id: str, token: str) -> bool:
        """Extend a lease; return False if the job was cancelled.

        Raises:
            ServiceError: JOB_NOT_FOUND or LEASE_LOST.
        """
        lease = await self.leases.extend(job_id, token)
        if lease is not None:
            await self._workers.touch(lease.worker_id)
            return True
        job = await self._ledger.get(job_id)
        if job.token == token and job.state is State.CANCELLED:
            return False
        raise ServiceError(Code.LEASE_LOST, f"job {job_id} is not leased under this token")

    async def tell(self, job_id: str, said: Reported | Completed | Failed | Released) -> Transition:
        """Apply a worker's report about its job, which also extends the lease.

        Raises:
            ServiceError: JOB_NOT_FOUND or LEASE_LOST.
        """
        lease = await self.leases.extend(job_id, said.token)
        if lease is not None:
            await self._workers.touch(lease.worker_id)
        return await self._ledger.apply(job_id, said)

    async def complete(self, job_id: str, said: Completed) -> Job:
        """Apply a worker's answer, and return the job. The worker may repeat the call with the same answer.

        Raises:
            ServiceError: JOB_NOT_FOUND; LEASE_LOST, also if the job has ended with another answer.
        """
        transition = await self.tell(job_id, said)
        if transition.event is None and transition.job.state is State.SUCCEEDED:
            stored = await self._ledger.read(self._ledger.store.result_of, job_id)
            if stored != said.result:
                raise ServiceError(Code.LEASE_LOST, f"job {job_id} has ended with another answer")
        return transition.job

    async def request_of(self, job_id: str, token: str) -> bytes:
        """Return the serialized request of a job to the holder of its last lease.

        Raises:
            ServiceError: JOB_NOT_FOUND or LEASE_LOST.
        """
        job = await self._ledger.get(job_id)
        if not job.token or job.token != token:
            raise ServiceError(Code.LEASE_LOST, f"job {job_id} is not leased under this token")
        return await self._ledger.read(self._ledger.store.request_of, job_id)

    async def sweep(self) -> None:
        """Expire the leases of silent workers twice a second, until this task is cancelled."""
        while True:
            planned = time.monotonic() + _SWEEP_S
            await asyncio.sleep(_SWEEP_S)
            late = time.monotonic() - planned
            if late > _LATE_S:
                self.leases.postpone(late)
            try:
                expired = await self.leases.take_expired()
            except ServiceError:  # the database is unreachable, which has been logged
                await asyncio.sleep(_AWAY_S)
            else:
                await self.expire(expired)

    async def expire(self, leases: Sequence[Lease]) -> None:
        """End leases whose deadline has passed. One that cannot be ended now gets a new deadline."""
        for lease in leases:
            try:
                await self._ledger.apply(lease.job_id, LeaseExpired(token=lease.token))
            except Exception:
                logger.exception(
                    "the expired lease of job %s could not be ended; it is tried again in %.0f s",
                    lease.job_id,
                    self.leases.duration_s,
                )
                self.leases.grant(lease)
            else:
                self._on_expiry()
                logger.warning(
                    "worker %s was silent for %.0f s and lost its lease on job %s",
                    lease.worker_id,
                    self.leases.duration_s,
                    lease.job_id,
                )

    def close(self) -> None:
        """Wake all waiting workers, whose claims then return without a job."""
        self._closed = True
        self.wake_all()

    def _grant(self, job: Job) -> None:
        self.leases.grant(Lease(job_id=job.id, token=job.token, worker_id=job.worker_id, principal=job.measured_by))

    async def _claim_surely(self, worker: Worker, principal: str) -> Grant | None:
        """Claim a job. If the caller leaves in the meantime, the job that it would have got goes back to the queue."""
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
            while True:
                heads = await self._ledger.heads(worker.torch_version)
                fitting = [each for each in heads if may_run(each.where, worker.labels)]
                if not fitting:
                    return None
                head = min(fitting, key=lambda head: (head.running, head.served_at, head.number))
                if await self._equal.have_ended(head):
                    continue
                token = secrets.token_hex(16)
                claimed = Claimed(worker_id=worker.id, token=token, hardware=worker.hardware, principal=principal)
                job = await self._ledger.claim(head.job_id, claimed, lease_s=self.leases.duration_s)
                if job is None:  # it has been cancelled, or another service's worker has got it
                    continue
                try:
                    request = await self._ledger.read(self._ledger.store.request_of, job.id)
                except ServiceError:
                    self._background.entrust(self.tell(job.id, Released(token=token)), "giving a job back")
                    raise
                wheres = {frozenset(each.where.items()): each.where for each in heads}
                return Grant(job=job, request=request, others=list(wheres.values()))
