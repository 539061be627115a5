"""Tells watchers of a job what is added to its history, without anybody asking the store."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fxlib_service.job import Event

_BACKLOG: Final = 256


class Subscription:
    """One watcher's queue. It is bounded: a watcher that reads too slowly is told to read from the store again."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | None] = asyncio.Queue(maxsize=_BACKLOG)

    def offer(self, event: Event | None) -> None:
        """Add an event; None, or an event too many, makes the watcher look again."""
        if self._events.full():
            while not self._events.empty():
                self._events.get_nowait()
            event = None
        self._events.put_nowait(event)

    async def next(self) -> Event | None:
        """Wait for the next event; None: look into the store (or at whether the service still runs)."""
        return await self._events.get()


class EventBroker:
    """All watchers, by job."""

    def __init__(self) -> None:
        self._subscriptions: defaultdict[str, set[Subscription]] = defaultdict(set)
        self.closed = False

    def publish(self, job_id: str, event: Event) -> None:
        """Hand an event that is stored to those who watch its job."""
        for subscription in self._subscriptions.get(job_id, ()):
            subscription.offer(event)

    @contextmanager
    def subscribe(self, job_id: str) -> Iterator[Subscription]:
        """Watch a job for the length of the block."""
        subscription = Subscription()
        self._subscriptions[job_id].add(subscription)
        try:
            yield subscription
        finally:
            watchers = self._subscriptions[job_id]
            watchers.discard(subscription)
            if not watchers:
                del self._subscriptions[job_id]

    @property
    def watchers(self) -> int:
        """How many watch."""
        return sum(map(len, self._subscriptions.values()))

    def close(self) -> None:
        """Wake everybody up to see that the service ends."""
        self.closed = True
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.offer(None)
