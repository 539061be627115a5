"""Threads for long checks of what others sent: few at a time, each with its place until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PLACES: Final = 2
"""A check holds the interpreter: two at a time leave the event loop its turn."""


class CheckPool:
    """Runs functions on threads of its own, at most two at a time.

    A caller that leaves takes its answer with it, and not the place: that is free when the thread ends. The threads
    are daemons, so that no check, however long, holds up the end of the service; they must change nothing.
    """

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_PLACES)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Wait for a place, call the function on a thread, and return what it returns, or raise what it raises."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def leave(result: T | None, error: BaseException | None) -> None:
            self._places.release()
            if answer.done():  # its caller has left
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]  # the function's own None among it

        def work() -> None:
            result, failure = None, None
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # whatever it is, it is the caller's
                failure = error
            with suppress(RuntimeError):  # the loop is closed: the service has ended
                loop.call_soon_threadsafe(leave, result, failure)

        Thread(target=work, name="fxlib-check", daemon=True).start()
        return await answer
