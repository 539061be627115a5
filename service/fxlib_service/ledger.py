"""Carries out what the state machine decides: stores it first, then announces it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from fxlib_service.background import Background
from fxlib_service.clock import Clock
from fxlib_service.errors import Code, ServiceError
from fxlib_service.events import EventBroker
from fxlib_service.job import Job
from fxlib_service.lifecycle import Claimed, Input, Transition, decide, observe
from fxlib_service.reserve import Reserve
from fxlib_service.stores.base import JobStore

P = ParamSpec("P")
T = TypeVar("T")

_READERS = 4


class Ledger:
    """Asynchronous access to the job store. Writes are serialized; nothing is announced before it is durable.

    Args:
        store: the store of jobs, which `close` closes.
        broker: is handed every event.
        background: finishes a write whose caller left, since what is stored must be announced.
        clock: stamps what happens.
        reserve: room on the disk for all that happens to jobs that were accepted.

    Attributes:
        listeners: functions that are called with every transition that changed a job, on the event loop's thread.
    """

    def __init__(
        self,
        store: JobStore,
        broker: EventBroker,
        background: Background,
        *,
        clock: Clock | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        self.store = store
        self._clock = clock or Clock()
        self._reserve = reserve
        self.listeners: list[Callable[[Transition], None]] = []
        self._broker = broker
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="fxlib-store-write")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="fxlib-store-read")
        self._background = background

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a reading method of the store."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: function(*args, **kwargs))

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a writing method of the store that changes no job, so that there is nothing to announce.

        Raises:
            ServiceError: STORAGE_FULL, if the disk is full and its reserve is used up; STORAGE_UNAVAILABLE.
        """

        def act() -> T:
            return function(*args, **kwargs)

        within = act if self._reserve is None else partial(self._reserve.within, act)
        return await asyncio.get_running_loop().run_in_executor(self._writer, within)

    async def get(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            ServiceError: JOB_NOT_FOUND.
        """
        job = await self.read(self.store.get, job_id)
        if job is None:
            raise job_not_found(job_id)
        return job

    async def submit(self, entry: Transition, request: bytes, *, queue_limit: int) -> Job:
        """Store a new job, or return the one that has the same request id.

        Raises:
            QueueFullError: the namespace has `queue_limit` queued jobs.
        """

        async def act() -> Job:
            # The reserve of the disk is not for new jobs.
            store = partial(self.store.submit, entry, request, queue_limit=queue_limit)
            job = await asyncio.get_running_loop().run_in_executor(self._writer, store)
            if job.id == entry.job.id:
                self._tell(entry)
            return job

        return await asyncio.shield(self._background.spawn(act()))

    async def apply(self, job_id: str, happened: Input) -> Transition:
        """Decide what follows for a job from what happened, store that, and announce it.

        Raises:
            ServiceError: JOB_NOT_FOUND, or LEASE_LOST.
        """
        transition = await self._change(self.store.update, job_id, happened)
        if transition is None:
            raise job_not_found(job_id)
        return transition

    async def claim(self, job_id: str, claimed: Claimed, *, lease_s: float) -> Job | None:
        """Lease a job for so many seconds, announce it, and return it; None if it cannot be claimed (any more)."""
        transition = await self._change(partial(self.store.claim, lease_s=lease_s), job_id, claimed)
        return None if transition is None else transition.job

    async def observe(self, job_id: str, live: bytes, *, went_back: str = "") -> Transition:
        """Store what a launcher tells of its training, and announce that it went back to its original.

        The listeners do not hear of it: the job has ended before, and stays as it ended.

        Raises:
            ServiceError: JOB_NOT_FOUND, or INVALID_REQUEST.
        """

        async def act() -> Transition:
            now = self._clock.now()
            told = await self.write(self.store.update, job_id, lambda job: observe(job, live, now, went_back=went_back))
            if told is None:
                raise job_not_found(job_id)
            if told.event is not None:
                self._broker.publish(job_id, told.event)
            return told

        return await asyncio.shield(self._background.spawn(act()))

    async def close(self) -> None:
        """Wait for the writes under way, and close the store."""
        await self._background.end()
        self._writer.shutdown()
        self._readers.shutdown()
        self.store.close()

    async def _change(
        self,
        change: Callable[[str, Callable[[Job], Transition]], Transition | None],
        job_id: str,
        happened: Input,
    ) -> Transition | None:
        async def act() -> Transition | None:
            now = self._clock.now()
            transition = await self.write(change, job_id, lambda job: decide(job, happened, now))
            if transition is not None:
                self._tell(transition)
            return transition

        return await asyncio.shield(self._background.spawn(act()))

    def _tell(self, transition: Transition) -> None:
        if transition.event is not None:
            self._broker.publish(transition.job.id, transition.event)
            for listener in self.listeners:
                listener(transition)


def job_not_found(job_id: str) -> ServiceError:
    """Return the refusal for a job that does not exist, or that the caller may not know of; the two look the same."""
    return ServiceError(Code.JOB_NOT_FOUND, f"no job {job_id}")
