"""Threads for long checks of what callers sent: few at a time, each holding its place until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PLACES: Final = 2
"""Number of checks that run at once. They hold the interpreter lock, and more would starve the event loop."""


class CheckPool:
    """Runs functions on threads of its own, at most two at a time.

    When a caller leaves, its check keeps its place until the thread ends. The threads are daemons, so that no check,
    however long, delays shutdown; the functions must therefore change nothing.
    """

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_PLACES)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Wait for a free place, call the function on a thread, and return its result or raise its exception."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def leave(result: T | None, error: BaseException | None) -> None:
            self._places.release()
            if answer.done():  # the caller has left
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]  # T may include None

        def work() -> None:
            result, failure = None, None
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the caller gets it
                failure = error
            with suppress(RuntimeError):  # the loop is closed, since the service has ended
                loop.call_soon_threadsafe(leave, result, failure)

        Thread(target=work, name="fxlib-check", daemon=True).start()
        return await answer
