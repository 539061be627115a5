"""Runs long checks of callers' data in a few processes, serves tenants in turn, and caches each answer."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Final, TypeVar, cast

from fxlib_service.errors import Code, ServiceError
from fxlib_service.fair_budget import FairBudget

T = TypeVar("T")

_PROCESSES: Final = 2
_WAITING: Final = 1_000
_LONGEST_S: Final = 100.0
_REMEMBERED_BYTES: Final = 64 << 20
"""Total size in bytes of all cached answers, as they came from the processes, including the overhead of each entry."""
_ENTRY_BYTES: Final = 500
_NICE: Final = 5
_MEMORY_BYTES: Final = 4 << 30
"""Memory in bytes that a check may take. An empty part of a message is two bytes there, and over a hundred in
memory."""
_CHECKS: Final = "fxlib_service.content_checks"

logger = logging.getLogger(__name__)


class CheckPool:
    """Runs functions in its own processes, at most two at a time, and one for each tenant.

    Tenants are served in turn. A check whose caller leaves continues, and occupies its process until it ends. The
    answer or refusal of a check is cached by its key, so that the same content is checked once, however often it
    arrives. The processes fork from one that has imported torch and run nothing; a process that hangs or dies is
    replaced.
    """

    def __init__(self) -> None:
        self.turns = FairBudget("checks", total=_PROCESSES, share=_PROCESSES - 1, waiting=_WAITING)
        self._idle = list[_Child]()
        self._busy = set[_Child]()
        self._known: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._bytes = 0
        self._closed = False
        self._running = dict[Hashable, asyncio.Future[_Answer]]()

    async def run(
        self,
        function: Callable[..., T],
        *args: object,
        tenant: str,
        key: Hashable = None,
        load: Callable[[bool], bytes] | None = None,
    ) -> T:
        """Return a function's result, or raise the ServiceError that it raises.

        Args:
            function: a function at the top level of a module, without side effects; it is called in another process.
            args: its arguments, which are pickled.
            tenant: the tenant that asks.
            key: identifies function and arguments in a few bytes; None if the answer is not to be cached.
            load: is called on a thread at this tenant's turn, and returns the first argument. Its own argument says
                whether the answer is known already; then it may return nothing, but still raise.

        Raises:
            ServiceError: the function's own; SERVICE_BUSY; CALL_TIMEOUT if it took too long.
        """
        check = _Check(function, args, key, load)
        if load is None and check.key in self._known:
            return cast(T, self._recalled(check.key))
        task = asyncio.ensure_future(self._at_its_turn(tenant, check))
        task.add_done_callback(_retrieved)
        try:
            return cast(T, await asyncio.shield(task))
        except asyncio.CancelledError:
            if not check.began:
                task.cancel()
            raise

    async def warm(self) -> None:
        """Start the processes before the first check. This takes as long as importing torch."""
        await asyncio.gather(*(asyncio.to_thread(self._start) for _ in range(self.turns.total)))

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        for child in (*self._idle, *self._busy):
            child.end()
        self._idle.clear()

    def _start(self) -> None:
        child = _Child()
        if self._closed:
            child.end()
        else:
            self._idle.append(child)

    async def _at_its_turn(self, tenant: str, check: _Check) -> object:
        async with self.turns.hold(tenant, 1):
            check.began = True
            known = self._known.get(check.key)
            data = () if check.load is None else (await asyncio.to_thread(check.load, known is not None),)
            if check.key in self._known:  # maybe since another tenant's check has ended in the meantime
                return self._recalled(check.key)
            if known is not None:  # evicted in the meantime
                return known.result()
            if check.key in self._running:  # another tenant has just asked for the same check
                return (await asyncio.shield(self._running[check.key])).result()
            answer = asyncio.ensure_future(self._asked(check.function, (*data, *check.args)))
            if check.key is None:
                return (await answer).result()
            self._running[check.key] = answer
            try:
                found = await answer
            finally:
                del self._running[check.key]
            self._remember(check.key, found)
            return found.result()

    async def _asked(self, function: Callable[..., object], args: tuple[object, ...]) -> _Answer:
        """Return the answer of a child process; one that was idle may have died, and a new one is asked then."""
        if self._idle:
            with suppress(EOFError, OSError):
                return await self._asked_of(self._idle.pop(), function, args)
        try:
            if self._closed:
                raise EOFError
            return await self._asked_of(await asyncio.to_thread(_Child), function, args)
        except (EOFError, OSError) as error:
            raise RuntimeError("a process that checks requests has died") from error

    async def _asked_of(self, child: _Child, function: Callable[..., object], args: tuple[object, ...]) -> _Answer:
        self._busy.add(child)
        try:
            answer = await asyncio.to_thread(child.ask, function, args)
        except TimeoutError:
            child.end()
            raise ServiceError(Code.CALL_TIMEOUT, f"a check took more than {_LONGEST_S:g} s") from None
        except BaseException:
            child.end()
            raise
        else:
            self._idle.append(child)
            return answer
        finally:
            self._busy.discard(child)

    def _recalled(self, key: Hashable) -> object:
        self._known.move_to_end(key)
        return self._known[key].result()

    def _remember(self, key: Hashable, answer: _Answer) -> None:
        self._known[key] = answer
        self._bytes += answer.size + _ENTRY_BYTES
        while self._bytes > _REMEMBERED_BYTES:
            _, oldest = self._known.popitem(last=False)
            self._bytes -= oldest.size + _ENTRY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The result of a check, or its refusal, with its serialized size in bytes."""

    found: object
    size: int

    def result(self) -> object:
        """Return the result, or raise the refusal."""
        if isinstance(self.found, ServiceError):
            raise self.found.copy()
        return self.found


class _Check:
    """One check: its function and arguments, and whether it has begun."""

    def __init__(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        key: Hashable,
        load: Callable[[bool], bytes] | None,
    ) -> None:
        self.function, self.args, self.load = function, args, load
        self.key = None if key is None else (function.__name__, key)
        self.began = False


class _Child:
    """A process that runs one check after another. It ends with the process that started it."""

    def __init__(self) -> None:
        context = get_context("forkserver")  # a plain fork would copy the locks of gRPC's threads
        context.set_forkserver_preload([_CHECKS])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="fxlib-check", daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, function: Callable[..., object], args: tuple[object, ...]) -> _Answer:
        """Return the function's result, or the ServiceError that it raises.

        Raises:
            TimeoutError: the answer took too long.
            EOFError, OSError: the process died.
            RuntimeError: the function failed in another way; the error holds the traceback.
        """
        self._pipe.send((function, args))
        if not self._pipe.poll(_LONGEST_S):
            raise TimeoutError
        data = self._pipe.recv_bytes()
        failed, found = ForkingPickler.loads(data)
        if failed:
            raise RuntimeError(found)
        return _Answer(found=found, size=len(data))

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        with suppress(OSError):
            self._pipe.close()


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service handles Ctrl-C
    os.nice(_NICE)  # the event loop comes first
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)  # which may be lower, and cannot be raised
    most = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = False, function(*args)
        except ServiceError as refusal:
            answer = False, refusal
        except MemoryError:
            problem = f"the check takes more than {most / (1 << 30):.3g} GiB of memory"
            answer = False, ServiceError(Code.INVALID_GRAPH, problem, hint="Send a smaller graph.")
        except Exception:  # noqa: BLE001  # the service logs it, whatever it is
            answer = True, traceback.format_exc()
        pipe.send(answer)


def _retrieved(task: asyncio.Future[object]) -> None:
    if not task.cancelled():
        task.exception()  # an awaiting caller gets it; for one that has left, asyncio would log it
