"""Carries out the decisions of the state machine: it stores them first, then announces them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
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
from fxlib_service.stores.base import Head, JobStore, NewJob, QueueFullError

P = ParamSpec("P")
T = TypeVar("T")

_READERS = 4
_NEW_AT_ONCE = 100
"""Largest number of new jobs that one transaction stores, since all other writes of the service wait for it."""


class Ledger:
    """Asynchronous access to the job store. Writes are serialized; nothing is announced before it is durable.

    Args:
        store: the store of jobs, which `close` closes.
        broker: publishes every event.
        background: finishes a write whose caller has left, since everything that is stored must be announced.
        clock: gives the times of events.
        reserve: room on the disk for the histories and answers of accepted jobs.

    Attributes:
        store: the store of jobs.
        broker: publishes every event to its watchers.
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
        self.broker = broker
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="fxlib-store-write")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="fxlib-store-read")
        self._background = background
        self._new = deque[tuple[NewJob, asyncio.Future[Job]]]()
        self._new_are_due = False

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a reading method of the store."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: function(*args, **kwargs))

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a writing method of the store that changes no job, and so has nothing to announce.

        Raises:
            ServiceError: STORAGE_FULL if the disk is full and its reserve is used up; STORAGE_UNAVAILABLE.
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

    async def heads(self, torch_version: str) -> Sequence[Head]:
        """Return the jobs that a worker of this torch version could claim now, the oldest of each namespace."""
        return await self.read(self.store.heads, torch_version, now=self._clock.now())

    async def submit(self, entry: Transition, request: bytes, *, queue_limit: int) -> Job:
        """Store a new job, or return the one that has the same request id.

        On return, the job is durable. Jobs that arrive while others are being stored are stored together in one
        transaction, since a disk syncs only some hundred times a second.

        Raises:
            QueueFullError: the namespace has `queue_limit` queued jobs.
        """
        entered: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._new.append((NewJob(transition=entry, request=request, queue_limit=queue_limit), entered))
        if not self._new_are_due:
            self._take_new()
        return await entered

    async def apply(self, job_id: str, happened: Input) -> Transition:
        """Decide what follows for a job from an occurrence, store the result, and announce it.

        Raises:
            ServiceError: JOB_NOT_FOUND, or LEASE_LOST.
        """
        transition = await self._change(self.store.update, job_id, happened)
        if transition is None:
            raise job_not_found(job_id)
        return transition

    async def claim(self, job_id: str, claimed: Claimed, *, lease_s: float) -> Job | None:
        """Lease a job for so many seconds, announce it, and return it; None if it cannot (or no longer) be claimed."""
        transition = await self._change(partial(self.store.claim, lease_s=lease_s), job_id, claimed)
        return None if transition is None else transition.job

    async def observe(self, job_id: str, live: bytes, *, went_back: str = "") -> Transition:
        """Store a launcher's report about its training, and announce it if the launcher went back to its original.

        The listeners are not called, since the job has already ended, and its outcome stays.

        Raises:
            ServiceError: JOB_NOT_FOUND, or INVALID_REQUEST.
        """

        async def act() -> Transition:
            now = self._clock.now()
            seen = await self.write(self.store.update, job_id, lambda job: observe(job, live, now, went_back=went_back))
            if seen is None:
                raise job_not_found(job_id)
            if seen.event is not None:
                self.broker.publish(job_id, seen.event)
            return seen

        return await asyncio.shield(self._background.spawn(act()))

    def _take_new(self) -> None:
        """Schedule the storing of the new jobs that arrive before the writer's next turn."""
        loop, self._new_are_due = asyncio.get_running_loop(), True
        over: asyncio.Future[None] = loop.create_future()
        self._background.keep(over)
        self._writer.submit(self._store_new, loop, over)

    def _store_new(self, loop: asyncio.AbstractEventLoop, over: asyncio.Future[None]) -> None:
        """Store the new jobs that have arrived; called on the writer's thread."""
        self._new_are_due = False  # first, so that jobs that arrive from now on are scheduled again
        coming = [self._new.popleft() for _ in range(min(len(self._new), _NEW_AT_ONCE))]
        outcomes = self._enter([new for new, _ in coming]) if coming else ()
        loop.call_soon_threadsafe(self._have_entered, coming, outcomes, over)

    def _enter(self, new: Sequence[NewJob]) -> Sequence[Job | Exception | None]:
        """Store new jobs, and return the outcome for each. They may not use the reserve of the disk."""
        try:
            return self.store.enter(new)
        except Exception as error:  # noqa: BLE001 - raised where the job was submitted
            passes = isinstance(error, ServiceError) and error.retry_after_s is not None  # a fault of the storage
            if len(new) == 1 or passes:
                return [error] * len(new)
            return [outcome for each in new for outcome in self._enter([each])]  # a single job may be at fault

    def _have_entered(
        self,
        came: Sequence[tuple[NewJob, asyncio.Future[Job]]],
        outcomes: Sequence[Job | Exception | None],
        over: asyncio.Future[None],
    ) -> None:
        over.set_result(None)
        if self._new and not self._new_are_due:
            self._take_new()
        for (_, entered), outcome in zip(came, outcomes, strict=True):
            if entered.cancelled():  # its caller left
                continue
            if isinstance(outcome, Job):
                entered.set_result(outcome)
            else:
                entered.set_exception(outcome or QueueFullError())
        for (new, _), outcome in zip(came, outcomes, strict=True):
            if isinstance(outcome, Job) and outcome.id == new.transition.job.id:
                self._tell(new.transition)

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
            try:
                transition = await self.write(change, job_id, lambda job: decide(job, happened, now))
            except ServiceError as error:
                if error.code is Code.STORAGE_UNAVAILABLE:  # it may be stored, if only the confirmation was lost
                    self.broker.missed_of(job_id)
                raise
            if transition is not None:
                self._tell(transition)
            return transition

        return await asyncio.shield(self._background.spawn(act()))

    def _tell(self, transition: Transition) -> None:
        if transition.event is not None:
            self.broker.publish(transition.job.id, transition.event)
            for listener in self.listeners:
                listener(transition)
        elif transition.job.state.finished:  # the call is a repeated one, perhaps since its confirmation was lost
            self.broker.missed_of(transition.job.id)


def job_not_found(job_id: str) -> ServiceError:
    """Return the refusal for a job that does not exist, or that is hidden from the caller; both look the same."""
    return ServiceError(Code.JOB_NOT_FOUND, f"no job {job_id}")
