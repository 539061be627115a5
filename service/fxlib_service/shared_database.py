"""Services that share a PostgreSQL database: their leases and counts in it, and what each learns of the others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from threading import Lock
from typing import Final

from typing_extensions import override

from fxlib_service.background import Background
from fxlib_service.dispatch import Dispatcher
from fxlib_service.errors import ServiceError
from fxlib_service.job import State
from fxlib_service.leases import Lease, Leases
from fxlib_service.ledger import Ledger
from fxlib_service.quotas import MINUTE_S, Counts
from fxlib_service.storage_faults import in_full
from fxlib_service.stores.postgres import Change, PostgresJobStore
from fxlib_service.workers import Workers

_AWAY_S: Final = 1.0
_RECALL_S: Final = 3.0

logger = logging.getLogger(__name__)


class StoredLeases(Leases):
    """Leases in the database, which any service may extend or expire. Each claim stores its own lease."""

    def __init__(self, ledger: Ledger, store: PostgresJobStore, *, duration_s: float) -> None:
        self._ledger = ledger
        self._store = store
        self.duration_s = duration_s

    @override
    def grant(self, lease: Lease) -> None:
        """Do nothing: the claim has stored the lease."""

    @override
    async def extend(self, job_id: str, token: str) -> Lease | None:
        return await self._ledger.write(self._store.extend, job_id, token, self.duration_s)

    @override
    async def holder(self, job_id: str) -> str:
        job = await self._ledger.read(self._store.get, job_id)
        return job.measured_by if job is not None and job.state is State.RUNNING else ""

    @override
    async def holds(self, token: str) -> bool:
        return await self._ledger.read(self._store.holds, token)

    @override
    def end(self, job_id: str) -> None:
        """Do nothing: a job that does not run has no lease."""

    @override
    def postpone(self, seconds: float) -> None:
        """Do nothing: `take_expired` goes by the last time that any of the services looked."""

    @override
    async def take_expired(self) -> Sequence[Lease]:
        return await self._ledger.write(self._store.take_expired, self.duration_s)


class StoredCounts(Counts):
    """The counts that quotas limit, of all services together.

    Calls are counted in the database only for namespaces whose open calls are bounded. A service reports how many it
    has, not that there is one more or one less, so that calls lost on the way, or with a service that was killed, do
    not count for long.

    Args:
        ledger: gives access to the store.
        store: holds the counts.
        background: finishes the work of callers that have left.
    """

    def __init__(self, ledger: Ledger, store: PostgresJobStore, background: Background) -> None:
        self._ledger = ledger
        self._store = store
        self._background = background
        self._calls = Counter[str]()
        self._lock = Lock()
        self._written = set[str]()
        """The namespaces whose calls the database has been told of."""
        self._due = set[str]()
        """The namespaces whose calls are still to be reported to it."""

    @override
    async def enter(self, namespace: str, allowed: int | None) -> bool:
        if allowed is None:
            self._add(namespace, 1)
            return True
        entering = asyncio.ensure_future(self._ledger.write(self._enter, namespace, allowed))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            self._background.entrust(self._leave_again(entering, namespace), "counting a call as over")
            raise

    @override
    def leave(self, namespace: str) -> None:
        self._add(namespace, -1)
        if namespace in self._written and namespace not in self._due:
            self._due.add(namespace)
            self._background.entrust(self._tell(namespace), "telling of open calls")

    @override
    async def live_report(self, tenant: str, per_minute: int) -> float:
        return await self._ledger.write(self._store.count_live_report, tenant, MINUTE_S / per_minute, MINUTE_S)

    async def tell(self) -> None:
        """Report all open calls, so that the other services know that this one is alive.

        Raises:
            ServiceError: STORAGE_UNAVAILABLE.
        """
        if self._written:
            await self._ledger.write(lambda: self._store.tell_calls(self._of(self._written)))
        await self._ledger.write(self._store.forget_counts)

    def _enter(self, namespace: str, allowed: int) -> bool:
        """Count a call on the writer's thread, one call after another."""
        with self._lock:
            own = self._calls[namespace] + 1
        if own > allowed or not self._store.count_calls(namespace, own, allowed):
            return False
        self._add(namespace, 1)
        self._written.add(namespace)
        return True

    async def _leave_again(self, entering: asyncio.Future[bool], namespace: str) -> None:
        if await entering:
            self.leave(namespace)

    async def _tell(self, namespace: str) -> None:
        def tell() -> None:
            self._due.discard(namespace)  # first, so that a call that ends from now on is reported again
            self._store.tell_calls(self._of({namespace}))

        try:
            await self._ledger.write(tell)
        except ServiceError:  # the database is unreachable; `tell` makes up for it
            self._due.discard(namespace)
            logger.debug("the end of a call cannot be written to the database")

    def _add(self, namespace: str, calls: int) -> None:
        with self._lock:
            self._calls[namespace] += calls
            if not self._calls[namespace]:
                del self._calls[namespace]

    def _of(self, namespaces: set[str]) -> dict[str, int]:
        with self._lock:
            return {each: self._calls[each] for each in namespaces}


class Sharing:
    """Passes the actions of other services on to this one's watchers and workers."""

    def __init__(
        self, ledger: Ledger, store: PostgresJobStore, dispatcher: Dispatcher, workers: Workers, counts: StoredCounts
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._dispatcher = dispatcher
        self._workers = workers
        self._counts = counts

    async def follow(self) -> None:
        """Pass on the changes of other services until this task is cancelled.

        Whenever changes may have been missed, watchers go back to the store, and waiting workers look for jobs.
        """
        away = False
        while True:
            try:
                async with aclosing(self._store.changes()) as changes:
                    async for change in changes:
                        if change is None and away:
                            logger.info("the database is back")
                        away = False
                        await self._pass_on(change)
            except ServiceError as error:
                if not away:
                    logger.warning("%s: %s", error, in_full(error.__cause__))
                away = True
                await asyncio.sleep(_AWAY_S)

    async def recall(self) -> None:
        """Every few seconds, read which workers the other services hear from, and report open calls to them."""
        while True:
            await asyncio.sleep(_RECALL_S)
            try:
                await self._workers.recall()
                await self._counts.tell()
            except ServiceError:
                logger.debug("calls cannot be exchanged with the other services now")

    async def _pass_on(self, change: Change | None) -> None:
        if change is None:
            self._ledger.broker.missed()
            self._dispatcher.wake_all()
            return
        if self._ledger.broker.watched(change.job_id):
            read = self._ledger.store.events
            for event in await self._ledger.read(read, change.job_id, after=change.sequence - 1, limit=1):
                self._ledger.broker.publish(change.job_id, event)
        if change.state is not State.RUNNING and (job := await self._ledger.read(self._store.get, change.job_id)):
            self._dispatcher.wake(job)
