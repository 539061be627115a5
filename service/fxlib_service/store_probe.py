"""Asks the store on behalf of probes and scrapes, which want an answer at once, also while the database is away.

A database that is gone refuses, which is an answer. One behind a network that drops everything says nothing for as long
as the driver waits; whoever asks here waits for a second, and as long as a question is stuck, nobody waits behind it.
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
    """Asks one question after the other, on a thread of its own.

    Args:
        store: the store that is asked.
        wait_s: the longest time for which anybody waits for an answer, in seconds.
    """

    def __init__(self, store: JobStore, *, wait_s: float = _WAIT_S) -> None:
        self._store = store
        self._wait_s = wait_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fxlib-store-probe")
        self._asked_at: float | None = None

    def answers(self) -> bool:
        """Whether the store answers."""
        return self.ask(_answered) is not None

    def ask(self, question: Callable[[JobStore], T]) -> T | None:
        """Return what the store answers, or None if it is away; at once, or within the longest time."""
        if (asked_at := self._asked_at) is not None and time.monotonic() - asked_at > self._wait_s:
            return None
        asked = self._thread.submit(self._ask, question)
        try:
            return asked.result(self._wait_s)
        except (TimeoutError, CancelledError, ServiceError):
            asked.cancel()
            return None

    def close(self) -> None:
        """End the thread, once its question is answered."""
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
