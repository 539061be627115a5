"""Wakes workers that wait for a job: one at a time, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Waiter:
    """One worker that waits."""

    def __init__(self) -> None:
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.looked = False

    async def wait(self, timeout_s: float) -> bool:
        """Wait to be woken, and then look; False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self.woken)
        except TimeoutError:
            return False
        self.looked = True
        return True


class Wakeups:
    """The workers that wait for jobs of one kind.

    A worker registers first (`waiting`), looks for a job, then waits: a job that is queued after the look wakes it. A
    worker that was woken and leaves without looking wakes the next one.
    """

    def __init__(self) -> None:
        self._waiting: deque[Waiter] = deque()

    def wake_one(self) -> None:
        """Wake the worker that has waited longest."""
        if self._waiting:
            self._waiting.popleft().woken.set_result(None)

    def wake_all(self) -> None:
        """Wake all workers."""
        while self._waiting:
            self.wake_one()

    @contextmanager
    def waiting(self) -> Iterator[Waiter]:
        """Register a waiter for the length of the block."""
        waiter = Waiter()
        self._waiting.append(waiter)
        try:
            yield waiter
        finally:
            with suppress(ValueError):
                self._waiting.remove(waiter)
            if waiter.woken.done() and not waiter.looked:
                self.wake_one()
