"""Queries the store for probes and scrapes, which need an answer at once, even while the database is unreachable.

A database that is down refuses the connection, which is an answer. One behind a network that drops everything does not
respond for as long as the driver waits. A caller here waits for one second at most, and while one question is stuck,
nobody waits behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Final, TypeVar

from fxlib_service.errors import ServiceError
from fxlib_service.stores.base import JobStore

T = TypeVar("T")

_WAIT_S: Final = 1.0


class StoreProbe:
    """Asks one question after another, on its own thread.

    Args:
        store: the store to query.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fxlib-store-probe")
        self._asked_at: float | None = None

    def answers(self) -> bool:
        """Return whether the store answers."""
        return self.ask(_answered) is not None

    def ask(self, question: Callable[[JobStore], T]) -> T | None:
        """Return the store's answer, or None if it is unreachable; wait one second at most."""
        if (asked_at := self._asked_at) is not None and time.monotonic() - asked_at > _WAIT_S:
            return None
        asked = self._thread.submit(self._ask, question)
        try:
            return asked.result(_WAIT_S)
        except (TimeoutError, CancelledError, ServiceError):
            asked.cancel()
            return None

    def close(self) -> None:
        """End the thread after its question is answered."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, question: Callable[[JobStore], T]) -> T:
        self._asked_at = time.monotonic()
        try:
            return question(self._store)
        finally:
            self._asked_at = None


def _answered(store: JobStore) -> bool:
    store.ping()
    return True
