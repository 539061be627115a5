"""Work that continues when the call that started it is cancelled. An orderly shutdown waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Background:
    """The background work of one service. It holds a reference to each task until the task ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def keep(self, work: asyncio.Future[T]) -> asyncio.Future[T]:
        """Count work as under way until it ends, and return it. Its failure goes to whoever awaits it, if anybody."""
        self._tasks.add(work)
        work.add_done_callback(self._ended)
        return work

    def spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Start a task that its caller awaits. When the caller is cancelled, the task continues."""
        task = asyncio.get_running_loop().create_task(work)
        self.keep(task)
        return task

    def entrust(self, work: Coroutine[object, object, object], what: str) -> None:
        """Start a task that nobody awaits; its failure is logged.

        Args:
            work: the task.
            what: what the task does, for the log: "ending equal jobs".
        """
        self.spawn(_logged(work, what))

    async def end(self) -> None:
        """Wait for all tasks, including those that start in the meantime."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # an awaiting caller gets it; for a cancelled one, asyncio would log it


async def _logged(work: Coroutine[object, object, object], what: str) -> None:
    try:
        await work
    except Exception:
        logger.exception("%s failed", what)
