"""Publishes each new event of a job to its watchers, so that nobody has to poll the store."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fxlib_service.job import Event

_BACKLOG: Final = 256


class Subscription:
    """The queue of one watcher. It is bounded: a watcher that falls behind is sent back to the store."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | None] = asyncio.Queue(maxsize=_BACKLOG)

    def offer(self, event: Event | None) -> None:
        """Add an event. None, or an event that finds the queue full, sends the watcher back to the store."""
        if self._events.full():
            while not self._events.empty():
                self._events.get_nowait()
            event = None
        self._events.put_nowait(event)

    async def next(self) -> Event | None:
        """Wait for the next event; None means that events were missed, or that the service is shutting down."""
        return await self._events.get()


class EventBroker:
    """The subscriptions of all watchers, by job. `closed` is set once the service shuts down."""

    def __init__(self) -> None:
        self._subscriptions: defaultdict[str, set[Subscription]] = defaultdict(set)
        self.closed = False

    def publish(self, job_id: str, event: Event) -> None:
        """Pass an event, which is already stored, to the watchers of its job."""
        for subscription in self._subscriptions.get(job_id, ()):
            subscription.offer(event)

    def watched(self, job_id: str) -> bool:
        """Return whether a job has watchers."""
        return job_id in self._subscriptions

    def missed(self) -> None:
        """Send all watchers back to the store, since events may have been missed."""
        for job_id in self._subscriptions:
            self.missed_of(job_id)

    def missed_of(self, job_id: str) -> None:
        """Send the watchers of a job back to the store."""
        for subscription in self._subscriptions.get(job_id, ()):
            subscription.offer(None)

    @contextmanager
    def subscribe(self, job_id: str) -> Iterator[Subscription]:
        """Subscribe to a job's events for the duration of the block."""
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
        """The number of subscriptions."""
        return sum(map(len, self._subscriptions.values()))

    def close(self) -> None:
        """Wake all watchers, which then see that the service is shutting down."""
        self.closed = True
        self.missed()
