"""Tasks that outlive their callers: held until they end, so that an orderly end waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Background:
    """The tasks under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Start a task that its caller waits for, and that goes on when the caller leaves."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def entrust(self, work: Coroutine[object, object, object], what: str) -> None:
        """Start a task that nobody waits for; its failure is logged."""
        self.spawn(_logged(work, what))

    async def end(self) -> None:
        """Wait until there is none left, those begun meanwhile included."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who waits for it is told; one that left does not want to know


async def _logged(work: Coroutine[object, object, object], what: str) -> None:
    try:
        await work
    except Exception:
        logger.exception("%s failed", what)
