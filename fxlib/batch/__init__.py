"""Many calls to one server in one message: the server's side, and how a caller reads the outcomes.

A trainer sends a list of calls, each a function with its arguments, and gets a list of outcomes in the same order: for
each call its result, or its error in the form in which `torch.distributed.rpc` carries the error of a single call.
`result` turns an outcome into what the single call would have returned or raised. Which calls travel
together is decided in `fxlib.passes.remote`.

>>> outcomes = rpc_sync("ps0", fxlib.batch.run, args=([(lookup, ("a", ids), {}), (lookup, ("b", ids), {})],))
>>> rows = [fxlib.batch.result(each) for each in outcomes]
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch.distributed.rpc import internal

from fxlib.batch.autograd_context import in_autograd_context as in_autograd_context
from fxlib.batch.isolation import as_sent, isolated, sendable
from fxlib.batch.known_rows import KnownRows as KnownRows
from fxlib.batch.pace import BRIEF_S, LONG_S, Look, Pace
from fxlib.batch.pace import THREADS as THREADS

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""A function, its positional arguments, and its keyword arguments."""
Many: TypeAlias = Callable[[list[tuple[tuple[Any, ...], Mapping[str, Any]]]], Sequence[Any]]
"""A declared batched form: it takes a list of (args, kwargs), and returns the results in the same order."""

TIMED_OUT = "RPCErr:1:"
"""The beginning of the message with which `torch.distributed.rpc` reports a timeout."""

_PACES: defaultdict[Callable[..., Any], Pace] = defaultdict(Pace)
"""The pace of each function whose calls came in batches."""
_LOCK = threading.Lock()
_running = 0
"""Number of threads that run calls of batches now; a thread that changes it holds `_LOCK`."""


def run(calls: Sequence[Call]) -> list[Any]:
    """Run independent calls, side by side where it pays, and return their outcomes in the order given.

    Calls that work for as long as they last run one after another in the calling thread; those that wait, or work long,
    are shared with a pool (see `fxlib.batch.pace`). Once one has lasted long, all others run side by side. A
    distributed autograd context belongs to one thread: inside of it, all calls run in the calling thread, in order.
    """
    calls = isolated(calls)
    if len(calls) < 2 or in_autograd_context():
        with _Batch(_counter()):
            return isolated([_landed(_outcome(call)) for call in calls])
    return isolated(_Shared(calls).run())


def run_in_order(calls: Sequence[Call], limit_s: float = 0.0) -> list[Any]:
    """Run calls one after another and stop at the first that fails; return the outcomes so far, the failure last.

    Each result is as it was when its call ended, even if a later call writes to what it returned.

    Args:
        calls: the calls, in program order.
        limit_s: the time limit of each call, in seconds; 0 is no limit. A call that takes longer has timed out for its
            caller, who makes no further calls.
    """
    outcomes: list[Any] = []
    with _Batch(_counter()):
        for count, call in enumerate(isolated(calls), start=1):
            start = time.perf_counter()
            outcome = _landed(_outcome(call))
            if 0.0 < limit_s < time.perf_counter() - start:
                outcome = _timed_out(limit_s)
            elif not failed(outcome):
                outcome = _outcome((as_sent if count < len(calls) else sendable, (outcome,), {}))
            outcomes.append(outcome)
            if failed(outcome):
                break
    return outcomes


def run_batched(batched_by: Many, calls: Sequence[Call]) -> list[Any]:
    """Have a function's declared batched form serve all calls; return their outcomes in the order given.

    If the batched form raises, or does not return one result for each call, the calls run singly after all, so that
    each has an outcome of its own. It must therefore do no harm to run the calls twice.
    """
    try:
        results = list(batched_by([(args, kwargs) for _, args, kwargs in isolated(calls)]))
    except Exception:  # noqa: BLE001 - which call failed shows when they run singly
        return run(calls)
    return isolated(results) if len(results) == len(calls) else run(calls)


def echo(payload: torch.Tensor) -> torch.Tensor:
    """Return the payload; the time that this takes tells how much the connection carries."""
    return payload


Failure: type = internal.RemoteException
"""The class of an outcome that is an error."""


def failed(outcome: Any) -> bool:
    """Return whether an outcome is an error."""
    return isinstance(outcome, Failure)


def any_failed(outcomes: Iterable[Any]) -> bool:
    """Return whether any of several outcomes is an error."""
    return Failure in map(type, outcomes)


def result(outcome: Any) -> Any:
    """Return the result that an outcome holds.

    Raises:
        Exception: the call failed; this is the error that `rpc_sync` would have raised for it.
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
    """Return an error as `rpc_sync` raises it: it has crossed C++, which keeps no more than these types and a text.

    This follows torch/csrc/distributed/rpc/python_functions.cpp, and `error_already_set::what` of pybind11.
    """
    kind = next((each for each in (ValueError, TypeError) if isinstance(error, each)), RuntimeError)
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    line = 0 if step is None else step.tb_lineno
    return kind(f"{type(error).__name__}: {error}\n\nAt:\n  {internal.__file__}({line}): _handle_exception\n")


def is_first() -> bool:
    """Return whether the call that this thread runs is the first of its message to ask this.

    The first one pays the cost that a message has once. A call that came by itself is first.
    """
    return position_in_message() == 0


def position_in_message() -> int:
    """Return how many calls of the running message have asked this before; 0 for a call that came by itself."""
    asked = _THREAD.asked
    return 0 if asked is None else next(asked)


def side_by_side() -> bool:
    """Return whether the calls of the running batch may run side by side, and need not run one after another."""
    return _THREAD.shared


class _Thread(threading.local):
    asked: Iterator[int] | None = None
    """The number of times that calls of the thread's message asked for their position; None outside of a message."""
    shared: bool = False
    """Whether the calls of the thread's batch run side by side."""


_THREAD = _Thread()


class _Queue:
    """Calls of one batch that are still to run, by their indices, and the number of threads that work on them."""

    __slots__ = ("indices", "threads")

    def __init__(self, indices: Iterable[int], threads: int) -> None:
        self.indices = deque(indices)
        self.threads = threads


class _Shared:
    """The calls of one batch, each run once, by whichever thread is free first."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._outcomes: list[Any] = [None] * len(calls)
        self._paces = [_PACES[_timed_as(call)] for call in calls]
        self._needed = {pace: pace.threads() for pace in set(self._paces)}
        in_turn = [index for index, pace in enumerate(self._paces) if self._needed[pace] == 1]
        shared = [index for index, pace in enumerate(self._paces) if self._needed[pace] > 1]
        self._in_turn = _Queue(in_turn, threads=1)
        """Calls that run one after another, until one of them shows that threads are worth it."""
        self._side_by_side = _Queue(shared, threads=0 if in_turn else 1)
        self._to_look_at = {self._paces[index] for index in in_turn}
        """Paces of the calls in turn of which the next call is to be looked at."""
        self._look: Look
        """The last look at the clocks by the thread that runs the calls in turn."""
        self._left = len(calls)
        """Number of calls that are not known to have run; a thread that changes it holds `_LOCK`."""
        self._ended: BaseException | None = None
        """The exception that would end a thread of the pool; it answers no call, and the whole batch raises it."""
        self._asked = _counter()
        self._unfinished = threading.Lock()
        """A lock that is held until all calls have run."""
        self._unfinished.acquire()

    def run(self) -> list[Any]:
        self._share(self._side_by_side, max(self._needed.values()))
        self._work(self._in_turn)
        self._work(self._side_by_side)
        self._unfinished.acquire()
        for pace, needed in self._needed.items():
            if needed == 1:
                pace.looked(in_turn=self._in_turn.threads == 1)
        if self._ended is not None:
            raise self._ended
        return [_landed(each) for each in self._outcomes]

    def _share(self, queue: _Queue, threads: int) -> None:
        """Have so many threads work on a queue; one that works on it already is the calling one."""
        more = min(len(queue.indices) - (queue.threads > 0), threads - queue.threads)
        queue.threads = max(queue.threads, threads)
        for _ in range(more):
            _helpers().put(functools.partial(self._work, queue))

    def _work(self, queue: _Queue) -> None:
        global _running  # noqa: PLW0603 - the threads of all batches of this process
        done = 0
        with _LOCK:
            _running += 1
        try:
            with _Batch(self._asked, shared=True):
                while queue.indices:
                    try:
                        index = queue.indices.popleft()
                    except IndexError:
                        break
                    by_itself = queue is self._in_turn and queue.threads == 1
                    needed = self._run_by_itself(index) if by_itself else self._paces[index].ran(self._run(index))
                    done += 1
                    if needed > queue.threads:
                        self._share(queue, needed)
        finally:
            with _LOCK:
                _running -= 1
                self._left -= done
                if done and not self._left:
                    self._unfinished.release()

    def _run_by_itself(self, index: int) -> int:
        """Run one of the calls in turn; return how many threads are worth it for those behind it.

        The processor time of the first call of each function is taken, of each one behind a call that was not brief,
        and of one that lasts long. Asking for it takes a server long beside a brief call.
        """
        pace, running = self._paces[index], _running
        looked_at = pace in self._to_look_at
        if looked_at:
            self._to_look_at.remove(pace)
            self._look = Look()
        lasted_s = self._run(index)
        if lasted_s >= BRIEF_S:
            self._to_look_at.add(pace)
        if lasted_s < LONG_S and not looked_at:
            return 1
        since, self._look = self._look, Look()
        return pace.ran_by_itself(lasted_s, self._look.waited_s(since), max(running, _running))

    def _run(self, index: int) -> float:
        """Run one call; return how long it lasted, in seconds."""
        start = time.perf_counter()
        try:
            self._outcomes[index] = _outcome(self._calls[index])
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._ended = error
        return time.perf_counter() - start


def _timed_as(call: Call) -> Callable[..., Any]:
    """Return the function under which a call's time is noted; for calls in order, the first one's."""
    function, args, _ = call
    return args[0][0][0] if function is run_in_order and args and args[0] else function


def _counter() -> Iterator[int]:
    """Return the counter of calls for a batch that begins now: a batch within another one shares the other's."""
    return itertools.count() if _THREAD.asked is None else _THREAD.asked


class _Batch:
    """A context in which the calls that a thread runs can learn about their batch."""

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
    """Return the queue from which the pool's threads take work; they start with the first batch that needs them.

    Nobody waits for this work by a future, and the threads of `concurrent.futures` always make futures: with them,
    sharing 13 calls costs a server 0.2 ms more.
    """
    work: SimpleQueue[Callable[[], None]] = SimpleQueue()
    for number in range(THREADS):
        threading.Thread(target=_help, args=(work,), name=f"fxlib-batch-{number}", daemon=True).start()
    return work


def _help(work: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        work.get()()


def _outcome(call: Call) -> Any:
    function, args, kwargs = call
    return internal._run_function(internal.PythonUDF(function, args, kwargs))


def _timed_out(limit_s: float) -> internal.RemoteException:
    """Return the outcome of a call that took too long, in the words of `torch.distributed.rpc`."""
    return internal.RemoteException(timeout_text(limit_s), TimeoutError)


def timeout_text(limit_s: float) -> str:
    """Return the words of `torch.distributed.rpc` about a call that took longer than its limit, in seconds."""
    limit = f"{int(torch.tensor(limit_s, dtype=torch.float32) * 1000)} ms"  # torch computes it in this precision
    return f"{TIMED_OUT}RPC ran for more than set timeout ({limit}) and will now be marked with an error"


def _landed(outcome: Any) -> Any:
    """Return an outcome after waiting for what `rpc.functions.async_execution` left in flight."""
    if isinstance(outcome, torch._C.Future):
        return internal._run_function(internal.PythonUDF(outcome.wait, (), {}))
    return outcome
