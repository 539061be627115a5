"""Many calls to one server in one message: what runs on the server, and how one outcome is told from another.

A trainer sends a list of calls, each a function with its arguments, and gets a list of outcomes in the same order: a
result, or the error as `torch.distributed.rpc` carries that of a single call. `result` turns an outcome into what the
single call would have returned or raised. Which calls travel together is decided in `fxlib.passes.remote`.

>>> outcomes = rpc_sync("ps0", fxlib.batch.run, args=([(lookup, ("a", ids), {}), (lookup, ("b", ids), {})],))
>>> rows = [fxlib.batch.result(each) for each in outcomes]
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed.rpc import internal

from fxlib.batch.isolation import apart, as_sent, sendable
from fxlib.batch.known_rows import KnownRows as KnownRows

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""A function, its positional arguments, and its keyword arguments."""
Many: TypeAlias = Callable[[list[tuple[tuple[Any, ...], Mapping[str, Any]]]], Sequence[Any]]
"""A declared batched form: from a list of (args, kwargs) to the results in the same order."""

THREADS = 16
"""That share the calls of all batches of this process, besides those that brought them: as many as an RPC agent has."""
_BRIEF_S = 2e-4
"""What takes less than this is not worth waking a thread for."""
_FORGET = 0.9
TIMED_OUT = "RPCErr:1:"
"""How `torch.distributed.rpc` begins the message of a timeout."""

_lasted_s: dict[Callable[..., Any], float] = {}
"""How long the calls of each function took lately, the longest of them above all."""


def run(calls: Sequence[Call]) -> list[Any]:
    """Run independent calls, side by side where it pays, and return their outcomes in the order given.

    Calls of functions that were brief lately run one after another in the calling thread; the others are shared with a
    pool, so that none waits for a slow one. In a distributed autograd context, which belongs to a thread, all run in
    the calling one, in order.
    """
    calls = apart(calls)
    if len(calls) < 2 or in_autograd_context():
        with _Batch(_counter()):
            return apart([_landed(_outcome(call)) for call in calls])
    return apart(_Shared(calls).run())


def run_in_order(calls: Sequence[Call], limit_s: float = 0.0) -> list[Any]:
    """Run calls one after another and stop at the first that fails; return the outcomes so far, the failure last.

    Each result is as it was when its call was over: those after it may write to what it returned.

    Args:
        calls: in program order.
        limit_s: a call that takes longer has timed out for its caller, who makes none after it; 0 is no limit.
    """
    outcomes: list[Any] = []
    with _Batch(_counter()):
        for place, call in enumerate(apart(calls), start=1):
            start = time.perf_counter()
            outcome = _landed(_outcome(call))
            if 0.0 < limit_s < time.perf_counter() - start:
                outcome = _timed_out(limit_s)
            elif not failed(outcome):
                outcome = _outcome((as_sent if place < len(calls) else sendable, (outcome,), {}))
            outcomes.append(outcome)
            if failed(outcome):
                break
    return outcomes


def run_batched(batched_by: Many, calls: Sequence[Call]) -> list[Any]:
    """Have a function's declared batched form serve all calls; return their outcomes in the order given.

    Where it raises, or does not return one result for each call, the calls run singly after all: then each has an
    outcome of its own. So the calls must be such that running them twice does no harm.
    """
    try:
        results = list(batched_by([(args, kwargs) for _, args, kwargs in apart(calls)]))
    except Exception:  # noqa: BLE001 - which call is to blame shows when they run singly
        return run(calls)
    return apart(results) if len(results) == len(calls) else run(calls)


def echo(payload: torch.Tensor) -> torch.Tensor:
    """Return what was sent: how long that takes says what the way carries."""
    return payload


Failure: type = internal.RemoteException
"""The class of an outcome that is an error."""


def failed(outcome: Any) -> bool:
    """Whether an outcome is an error."""
    return isinstance(outcome, Failure)


def result(outcome: Any) -> Any:
    """Return the result that an outcome is.

    Raises:
        Exception: the call failed: what `rpc_sync` would have raised for it.
    """
    if not failed(outcome):
        return outcome
    if outcome.exception_type is TimeoutError and outcome.msg.startswith(TIMED_OUT):
        raise RuntimeError(outcome.msg)
    try:
        internal._handle_exception(outcome)
    except Exception as error:  # noqa: BLE001 - whatever a server raises
        raised = error
    raise _as_rpc_raises(raised)


def _as_rpc_raises(error: Exception) -> Exception:
    """Return an error as it comes out of `rpc_sync`, which crosses C++ and keeps no more than these types and a text.

    As torch does: torch/csrc/distributed/rpc/python_functions.cpp, and `error_already_set::what` of pybind11.
    """
    kind = next((each for each in (ValueError, TypeError) if isinstance(error, each)), RuntimeError)
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    line = 0 if step is None else step.tb_lineno
    return kind(f"{type(error).__name__}: {error}\n\nAt:\n  {internal.__file__}({line}): _handle_exception\n")


def is_first() -> bool:
    """Whether the call that this thread runs is the first of its message to ask: it pays what a message costs but once.

    A call that came by itself is first.
    """
    return place() == 0


def place() -> int:
    """Return how many calls of the running message have asked for theirs before; 0 for a call that came by itself."""
    asked = _THREAD.asked
    return 0 if asked is None else next(asked)


def side_by_side() -> bool:
    """Whether the calls of the running batch run side by side, and not one after another."""
    return _THREAD.shared


class _Thread(threading.local):
    asked: Iterator[int] | None = None
    """Counts how often the calls of the thread's message have asked for their place in it."""
    shared: bool = False
    """Whether the calls of the thread's batch run side by side."""


_THREAD = _Thread()


class _Shared:
    """The calls of one batch, each run once, by whichever thread is free first."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._outcomes: list[Any] = [None] * len(calls)
        brief = [_lasted_s.get(_timed_as(call), 1.0) < _BRIEF_S for call in calls]
        self._slow = deque(place for place, each in enumerate(brief) if not each)
        self._brief = deque(place for place, each in enumerate(brief) if each)
        self._left = len(calls)
        self._ended: BaseException | None = None
        """What would have ended a thread of the pool: no answer to a call, so the whole batch raises it."""
        self._asked = _counter()
        self._lock = threading.Lock()
        self._running = threading.Lock()
        """Held until all calls have run."""
        self._running.acquire()

    def run(self) -> list[Any]:
        self._call_for_help(self._slow, spared=0 if self._brief else 1)
        self._work(self._brief)
        self._work(self._slow)
        self._running.acquire()
        if self._ended is not None:
            raise self._ended
        return [_landed(each) for each in self._outcomes]

    def _call_for_help(self, places: deque[int], *, spared: int) -> None:
        for _ in range(min(len(places) - spared, THREADS)):
            _helpers().put(functools.partial(self._work, places))

    def _work(self, places: deque[int]) -> None:
        with _Batch(self._asked, shared=True):
            while places:
                try:
                    place = places.popleft()
                except IndexError:
                    return
                surprising = self._run(place) >= _BRIEF_S and places is self._brief
                if surprising:  # the rest shall not wait for another such
                    self._call_for_help(places, spared=1)

    def _run(self, place: int) -> float:
        """Run one call and return how long it took."""
        call = self._calls[place]
        start = time.perf_counter()
        try:
            self._outcomes[place] = _outcome(call)
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._ended = error
        lasted_s = time.perf_counter() - start
        function = _timed_as(call)
        _lasted_s[function] = max(lasted_s, _FORGET * _lasted_s.get(function, 0.0))
        with self._lock:
            self._left -= 1
            if not self._left:
                self._running.release()
        return lasted_s


def _timed_as(call: Call) -> Callable[..., Any]:
    """Return the function whose time a call takes: of calls in order, that of the first."""
    function, args, _ = call
    return args[0][0][0] if function is run_in_order and args and args[0] else function


def _counter() -> Iterator[int]:
    """Return what counts the calls of a batch that begins now: within another one the other's, one for a message."""
    return itertools.count() if _THREAD.asked is None else _THREAD.asked


class _Batch:
    """While a thread runs calls of a batch, what they can learn of it."""

    __slots__ = ("_asked", "_outer", "_shared")

    def __init__(self, asked: Iterator[int], *, shared: bool = False) -> None:
        self._asked, self._shared = asked, shared

    def __enter__(self) -> None:
        self._outer = _THREAD.asked, _THREAD.shared
        _THREAD.asked, _THREAD.shared = self._asked, self._shared

    def __exit__(self, *_: object) -> None:
        _THREAD.asked, _THREAD.shared = self._outer


@functools.cache
def _helpers() -> SimpleQueue[Callable[[], None]]:
    """Return what threads take work from; they start with the first batch that needs them.

    Nobody waits for the work by a future, which the threads of `concurrent.futures` cannot do without: with those, to
    share 13 calls costs a server 0.2 ms more.
    """
    work: SimpleQueue[Callable[[], None]] = SimpleQueue()
    for number in range(THREADS):
        threading.Thread(target=_help, args=(work,), name=f"fxlib-batch-{number}", daemon=True).start()
    return work


def _help(work: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        work.get()()


def in_autograd_context() -> bool:
    """Whether the calling thread is in a distributed autograd context."""
    try:
        if int(dist_autograd._get_debug_info()["num_autograd_contexts"]) == 0:  # an error takes long to raise
            return False
        dist_autograd._current_context()
    except RuntimeError:
        return False
    return True


def _outcome(call: Call) -> Any:
    function, args, kwargs = call
    return internal._run_function(internal.PythonUDF(function, args, kwargs))


def _timed_out(limit_s: float) -> internal.RemoteException:
    """Return the outcome of a call that took too long, in the words of `torch.distributed.rpc`."""
    limit = f"{int(limit_s * 1000)} ms"
    told = f"{TIMED_OUT}RPC ran for more than set timeout ({limit}) and will now be marked with an error"
    return internal.RemoteException(told, TimeoutError)


def _landed(outcome: Any) -> Any:
    """Wait for what `rpc.functions.async_execution` left in flight."""
    if isinstance(outcome, torch._C.Future):
        return internal._run_function(internal.PythonUDF(outcome.wait, (), {}))
    return outcome
