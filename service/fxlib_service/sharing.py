"""What services that share a database have in common: leases in it, and word of what the others did."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from typing_extensions import override

from fxlib_service.dispatch import Dispatcher
from fxlib_service.errors import ServiceError
from fxlib_service.events import EventBroker
from fxlib_service.job import State
from fxlib_service.leases import Lease, Leases
from fxlib_service.ledger import Ledger
from fxlib_service.storage_faults import in_full
from fxlib_service.stores.postgres import Change, PostgresJobStore
from fxlib_service.workers import Workers

_AWAY_S: Final = 1.0
_RECALL_S: Final = 3.0

logger = logging.getLogger(__name__)


class StoredLeases(Leases):
    """Leases in the database, which any service may extend or expire. A claim stores its lease by itself."""

    def __init__(self, ledger: Ledger, store: PostgresJobStore, *, duration_s: float) -> None:
        self._ledger = ledger
        self._store = store
        self.duration_s = duration_s

    @override
    def grant(self, lease: Lease) -> None:
        """Nothing is left to do: the claim has stored the lease."""

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
        """Nothing is left to do: a job that does not run has no lease."""

    @override
    def postpone(self, seconds: float) -> None:
        """Nothing is left to do: `take_expired` judges by when any of the services last looked."""

    @override
    async def take_expired(self) -> Sequence[Lease]:
        return await self._ledger.write(self._store.take_expired, self.duration_s)


class Sharing:
    """Brings what the other services do to this one's watchers and workers."""

    def __init__(
        self, ledger: Ledger, store: PostgresJobStore, broker: EventBroker, dispatcher: Dispatcher, workers: Workers
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._broker = broker
        self._dispatcher = dispatcher
        self._workers = workers

    async def follow(self) -> None:
        """Pass on what other services change, until this task is cancelled.

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
        """Read every few seconds which workers the other services hear from, until this task is cancelled."""
        while True:
            await asyncio.sleep(_RECALL_S)
            try:
                await self._workers.recall()
            except ServiceError:
                logger.debug("the workers of other services cannot be read now")

    async def _pass_on(self, change: Change | None) -> None:
        if change is None:
            self._broker.missed()
            self._dispatcher.wake_all()
            return
        if self._broker.watched(change.job_id):
            read = self._ledger.store.events
            for event in await self._ledger.read(read, change.job_id, after=change.sequence - 1, limit=1):
                self._broker.publish(change.job_id, event)
        if change.state is not State.RUNNING and (job := await self._ledger.read(self._store.get, change.job_id)):
            self._dispatcher.wake(job)
