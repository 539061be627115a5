"""Tell readers about changes: one thread follows each source while anybody reads it, however many readers there are."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Final, Generic, TypeVar

from fxlib.client import Client
from fxlib.dashboard.view import View
from fxlib.dashboard.zoos import Zoos
from fxlib.errors import FxlibError, RemoteError, ServiceUnavailableError
from fxlib.spec.job import Event

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_KEPT: Final = 10_000
"""Maximum number of a feed's messages that are kept for later readers."""
_MOST_FEEDS: Final = 200
_POLL_S: Final = 1.0
_FOLLOW_S: Final = 10.0
"""Time that a thread follows a job before it checks whether anybody still reads, in seconds."""
_TICK_S: Final = 1.0


class Feed(Generic[T]):
    """Messages that a thread finds while anybody reads them. Everything but `find` happens on the event loop.

    Args:
        find: a function that runs on the thread: it passes on each message, and returns when there are no more, or when
            nobody reads any longer.
    """

    def __init__(self, find: Callable[[Callable[[T], None], Callable[[], bool]], None]) -> None:
        self._find = find
        self._loop = asyncio.get_running_loop()
        self._messages: list[T] = []
        self._dropped = 0
        self._readers = 0
        self._running = False
        self._over = False
        self._news = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether there are no readers."""
        return not self._readers

    async def read(self, *, from_now: bool = False) -> AsyncGenerator[T | None]:
        """Yield all messages, or those from now on; None at least once a second, so that the reader can stop."""
        self._readers += 1
        at = self._dropped + len(self._messages) if from_now else 0
        try:
            while True:
                self._start()
                news, at = self._news, max(at, self._dropped)
                while at - self._dropped < len(self._messages):
                    at += 1
                    yield self._messages[at - 1 - self._dropped]
                    at = max(at, self._dropped)
                if self._over:
                    return
                try:
                    async with asyncio.timeout(_TICK_S):
                        await news.wait()
                except TimeoutError:
                    yield None
        finally:
            self._readers -= 1

    def _start(self) -> None:
        if not (self._running or self._over):
            self._running = True
            threading.Thread(target=self._run, name="fxlib-feed", daemon=True).start()

    def _run(self) -> None:
        over = True
        try:
            self._find(lambda message: self._on_loop(self._tell, message), lambda: self._readers > 0)
            over = self._readers > 0
        except Exception:  # noqa: BLE001 - readers learn of the thread's end, whatever the cause
            _LOG.exception("a feed ended")
        finally:
            self._on_loop(self._ended, over)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _tell(self, message: T) -> None:
        self._messages.append(message)
        if len(self._messages) > _KEPT:
            self._dropped += 1
            del self._messages[0]
        self._wake()

    def _ended(self, over: bool) -> None:
        self._running, self._over = False, over
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Live:
    """The feeds of all changes, of zoo runs, and of each job that is followed. It is created on the event loop."""

    def __init__(self, client: Client, view: View, zoos: Zoos) -> None:
        self._client, self._view = client, view
        self.changes: Feed[str] = Feed(lambda tell, wanted: _poll(view, tell, wanted))
        self.zoos: Feed[str] = Feed(lambda tell, wanted: _poll(zoos, tell, wanted))
        self._jobs: dict[str, Feed[Event]] = {}

    def job(self, job_id: str) -> Feed[Event] | None:
        """Return the feed of a job's events; None if too many other jobs are followed."""
        self._jobs = {key: feed for key, feed in self._jobs.items() if not feed.idle}
        if job_id not in self._jobs:
            if len(self._jobs) >= _MOST_FEEDS:
                return None
            self._jobs[job_id] = Feed(lambda tell, wanted: self._follow(job_id, tell, wanted))
        return self._jobs[job_id]

    def _follow(self, job_id: str, tell: Callable[[Event], None], wanted: Callable[[], bool]) -> None:
        last = 0

        def note(event: Event) -> None:
            nonlocal last
            last = event.sequence
            self._view.forget()
            tell(event)

        while wanted():
            try:
                self._client.watch(job_id, note, after=last, timeout_s=_FOLLOW_S)
            except ServiceUnavailableError:  # the job is not done yet, or the service is away
                time.sleep(_POLL_S)
            except (RemoteError, ValueError):  # there is no such job, or the client was closed
                return
            else:
                return


def _poll(source: View | Zoos, tell: Callable[[str], None], wanted: Callable[[], bool]) -> None:
    last = None
    while wanted():
        away = False
        try:
            now = source.fingerprint()
        except FxlibError as error:  # also for an answer that only a later release can read
            now, away = type(error).__name__, True
        except ValueError:  # the client was closed
            return
        if now != last and (away or last is not None):  # open pages were made while the service was available
            source.forget()
            tell(now)
        last = now
        time.sleep(_POLL_S)
