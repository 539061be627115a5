"""Wakes workers that wait for a job: one at a time, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Visitor:
    """One who waits at the bell."""

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


class Doorbell:
    """Those who wait for work of one kind.

    Come first (`visit`), look for work, then wait: what is queued after the look rings a bell that is attended. Who is
    woken and leaves without looking wakes the next one.
    """

    def __init__(self) -> None:
        self._waiting: deque[Visitor] = deque()

    def ring(self) -> None:
        """Wake the one who has waited longest."""
        if self._waiting:
            self._waiting.popleft().woken.set_result(None)

    def ring_all(self) -> None:
        """Wake everybody."""
        while self._waiting:
            self.ring()

    @contextmanager
    def visit(self) -> Iterator[Visitor]:
        """Stand at the bell for the length of the block."""
        visitor = Visitor()
        self._waiting.append(visitor)
        try:
            yield visitor
        finally:
            with suppress(ValueError):
                self._waiting.remove(visitor)
            if visitor.woken.done() and not visitor.looked:
                self.ring()
