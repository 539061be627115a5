"""Many calls in one message: they are issued together, and waited for one by one."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed import rpc

from fxlib import batch
from fxlib.errors import ContractError, FxlibError, FxlibWarning
from fxlib.runtime import functions
from fxlib.runtime.ahead import was_left
from fxlib.runtime.dynamo import outside_of_dynamo
from fxlib.runtime.ops.operators import Future, call_now, is_this_process, server_name
from fxlib.runtime.tracking.flow_control import DEADLINES, in_own_time, own_timeout
from fxlib.runtime.tracking.forward_context import THREAD, current_flow_control, received

NamedCall: TypeAlias = tuple[str, tuple[Any, ...], Mapping[str, Any]]
"""A remote function by its name, its positional arguments, and its keyword arguments."""
IN_ORDER = "fxlib.batch:run_in_order"
"""The batched form of calls that may write: they run one after another until one fails."""


@outside_of_dynamo
def issue_batch(to: Any, calls: tuple[NamedCall, ...], timeout: float | None, batched_by: str | None) -> BatchInFlight:
    """Start several calls in one message, and return the batch in flight, which `wait_item` takes. Never raises.

    Each call is one of `remote_call`. Calls to this very process have ended when this returns.

    Args:
        to: a worker's name, rank or `WorkerInfo`.
        calls: (function, args, kwargs) of each call; no methods of RRefs.
        timeout: the timeout of each call, in seconds; None is the default of the RPC layer, 0 is no limit.
        batched_by: "package.module:qualname" of the declared batched form of their function. With None they run singly,
            side by side; with `IN_ORDER` one after another. Calls may write only with `IN_ORDER`.
    """
    flying = BatchInFlight(to, calls, timeout, in_order=batched_by == IN_ORDER)
    try:
        flying.future = _admitted(to, calls, timeout, batched_by)
        if is_this_process(to):
            with contextlib.suppress(Exception):  # the waits raise it
                flying.future.wait()
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the waits
        flying.refused = error
    return flying


@outside_of_dynamo
def wait_item(flying: Any, index: int) -> Any:
    """Block until a batch is complete and return the result of its call number `index`.

    Raises:
        ContractError: the argument is no result of `issue_batch`, or there is no such call.
        Exception: what the blocking call would have raised.
    """
    if isinstance(flying, BatchInFlight) and 0 <= index < len(flying.outcomes):
        outcome = flying.outcomes[index]
        if type(outcome) is torch.Tensor:  # most results are, and this runs for each lookup
            return outcome
    if not isinstance(flying, BatchInFlight) or not 0 <= index < len(flying):
        raise ContractError(f"there is no call {index} in a {type(flying).__name__}", where="wait_item")
    result = flying.result(index)
    return result if type(result) is torch.Tensor else received(result)


class BatchInFlight:
    """Calls in flight in one message; only the thread that issued them uses it."""

    def __init__(self, to: Any, calls: Sequence[NamedCall], timeout_s: float | None, *, in_order: bool) -> None:
        """Keep the calls, so that they can be made singly if the message cannot be sent or served."""
        self._in_order = in_order
        self.future: Future | None = None
        self.refused: Exception | None = None
        """Why the message could not be sent."""
        self._to = to
        self._calls = calls
        self._timeout_s = timeout_s
        self.outcomes: list[Any] = []
        """The outcomes, once they have arrived; the last one stands for all after it."""

    def __len__(self) -> int:
        return len(self._calls)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(future)` once the message has been answered."""
        if self.future is not None:
            self.future.add_done_callback(callback)

    def result(self, index: int) -> Any:
        """Return one result, or raise the error that the single call would have raised."""
        if not self.outcomes:
            self.outcomes = self._receive()
            if (forward := THREAD.forward) is not None and forward.shares_nodes:
                forward.came_with |= dict.fromkeys(map(id, self.outcomes), weakref.ref(self))
        outcome = self.outcomes[index if index < len(self.outcomes) else -1]
        if isinstance(outcome, _Raised):
            raise outcome.error
        return batch.result(outcome)

    def _receive(self) -> list[Any]:
        """Wait for the outcomes, and return them; the last one stands for all after it.

        A batch fails as a whole if one of its arguments or functions cannot travel, if its server has no `fxlib.batch`
        or is gone, or if one of its calls takes too long. If its calls change nothing, they are made again, one by one,
        as the program would make them: then the error, if any, is the program's. Calls that may write are made again
        only if the message was never sent, or was refused before any of them ran; otherwise its error is that of the
        first call.
        """
        cause = self.refused
        stops = isinstance(cause, FxlibError) and not isinstance(cause, ContractError)
        if cause is not None and (stops or was_left(cause)):
            return [_Raised(cause)]  # the program must not make calls now
        try:
            if self.future is not None:
                landed: list[Any] = self.future.wait()
                return landed
        except Exception as error:  # noqa: BLE001 - the message tells what happened, whatever the class
            cause = error
            if self._in_order and not is_refusal(error):
                return [_Raised(in_own_time(error, self._timeout_s))]
        finally:
            if self.future is not None:
                DEADLINES.forget(self.future)
        outcomes = self._one_by_one()
        if cause is not None and not isinstance(outcomes[-1], _Raised):
            self._note(cause)
        return outcomes

    def _note(self, cause: Exception) -> None:
        """Note why the message failed, after all of its calls have succeeded singly."""
        if str(cause).startswith(batch.TIMED_OUT):
            _PATIENCE[_key(self._to, self._calls)] = 2 * _patience(self._to, self._calls)
        else:
            tell_of_refusal(server_name(self._to), cause)

    def _one_by_one(self) -> list[Any]:
        outcomes: list[Any] = []
        for function, args, kwargs in self._calls:
            try:
                outcomes.append(call_now(self._to, function, args, kwargs, self._timeout_s))
            except Exception as error:  # noqa: BLE001 - the wait raises it
                return [*outcomes, _Raised(error)]
        return outcomes


@dataclass(frozen=True, slots=True)
class _Raised:
    """An outcome that was raised in this process."""

    error: Exception


def _admitted(to: Any, calls: Sequence[NamedCall], timeout: float | None, batched_by: str | None) -> Future:
    flow_control = current_flow_control()
    if flow_control is None:
        return _start(to, calls, timeout, batched_by)
    functions_, sent = "+".join(name for name, _, _ in calls), [each[1:] for each in calls]
    return flow_control.start(server_name(to), functions_, sent, lambda: _start(to, calls, timeout, batched_by))


def _start(to: Any, calls: Sequence[NamedCall], timeout: float | None, batched_by: str | None) -> Future:
    found = [(functions.resolve(name), args, kwargs) for name, args, kwargs in calls]
    own = own_timeout(timeout)
    server, total = server_name(to), own * len(calls)
    turns = len(calls) if batched_by == IN_ORDER else min(_patience(to, calls), len(calls))
    limit = DEADLINES.deadline(server, own * turns)
    function: Callable[..., Any]
    args: tuple[Any, ...]
    if batched_by == IN_ORDER:
        function, args = batch.run_in_order, (found, own)
    elif batched_by is None:
        function, args = batch.run, (found,)
    else:
        function, args = batch.run_batched, (functions.resolve(batched_by), found)
    future = rpc.rpc_async(to, function, args=args, timeout=limit)
    DEADLINES.watch(server, total, future)
    return future


def _patience(to: Any, calls: Sequence[NamedCall]) -> int:
    """Return how many times the timeout of one call a batch may take before its calls are made singly.

    It is once at first, since the calls run side by side, and nobody should wait longer for a server that is gone. It
    doubles each time that all calls then succeed singly, since such a server works on them one after another.
    """
    return _PATIENCE.get(_key(to, calls), 1)


def _key(to: Any, calls: Sequence[NamedCall]) -> tuple[str, ...]:
    return (server_name(to), *(name for name, _, _ in calls))


_PATIENCE: dict[tuple[str, ...], int] = {}


_UNREAD = "Error on Node "
"""The beginning of an error that `torch.distributed.rpc` found before it ran the function of a message."""
_UNKNOWN = "Default RPC pickler does not serialize"
"""The beginning of the RPC pickler's error about a function that is not in a module."""
_OTHERWISE = "run_in_order() takes "
"""The beginning of Python's error about a function with other parameters."""


def is_refusal(error: Exception) -> bool:
    """Return whether a message that runs calls in order failed before any of them ran, so that they may be made singly.

    The calls' own errors are never the message's.

    Args:
        error: the error of the message itself.
    """
    text = str(error)
    if text.startswith(_UNREAD) and "): deserialize" in text:
        return True
    return "On WorkerInfo(" in text and (_UNKNOWN in text or _OTHERWISE in text)


def tell_of_refusal(server: str, cause: Exception) -> None:
    """Warn, once for each server, that it refused a message whose calls were then made one by one."""
    if server in _REFUSED_BY:
        return
    _REFUSED_BY.add(server)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    reason = " ".join(lines[:2]) or type(cause).__name__
    warnings.warn(
        f"{server}: many calls in one message are refused, and made one by one, which is slow: {reason} "
        "Install this version of fxlib on the server, or rewrite without coalesce_calls.",
        FxlibWarning,
        stacklevel=2,
    )


_REFUSED_BY: set[str] = set()
