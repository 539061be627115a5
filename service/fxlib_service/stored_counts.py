"""The counts that quotas limit if several services share a database: the services count together in it.

Calls are counted there only for namespaces whose open calls are bounded. A service reports how many it has, not that
there is one more or one less, so that calls lost on the way, or with a service that was killed, do not count for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from threading import Lock

from typing_extensions import override

from fxlib_service.background import Background
from fxlib_service.errors import ServiceError
from fxlib_service.ledger import Ledger
from fxlib_service.quotas import MINUTE_S, Counts
from fxlib_service.stores.postgres import PostgresJobStore

logger = logging.getLogger(__name__)


class StoredCounts(Counts):
    """The counts of all services.

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
