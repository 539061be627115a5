"""The operators that generated code calls: remote calls, blocking and issued, and the wait that joins them.

Each operator takes exactly its documented positional arguments. A blocking operator does what the user's own idiom
does, through the same entry points of `torch.distributed.rpc`; an issuing one starts the same call, never raises, and
leaves its errors to the wait. All run in the caller's thread, and so in its distributed autograd context.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed import rpc
from torch.distributed.rpc import rref_proxy

from fxlib import batch
from fxlib.runtime import functions
from fxlib.runtime.dynamo import outside_of_dynamo
from fxlib.runtime.tracking.flow_control import DEADLINES, FlowControl, in_own_time
from fxlib.runtime.tracking.forward_context import current_flow_control, current_forward, received
from fxlib.runtime.tracking.track import track, track_together

# `rpc_async` returns a `torch._C.Future`, of which `torch.futures.Future` is a subclass.
Future: TypeAlias = "torch._C.Future[Any]"
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Starter = Callable[..., Any]


@outside_of_dynamo
def remote_call(to: Any, function: str, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
    """Call `function` on `to`, block, and return its result: `rpc_sync`, or `rref.rpc_sync().method`.

    Args:
        to: a worker's name, rank or `WorkerInfo`, or the RRef whose object's method is called.
        function: "package.module:qualname", or ".method" of the object behind the RRef `to`.
        args: positional arguments of the remote function.
        kwargs: keyword arguments of the remote function.
        timeout: the timeout in seconds; None is the default of the RPC layer, 0 is no limit.

    Raises:
        ContractError: no function is known by this name.
        Exception: whatever `rpc_sync` raises: the remote function's own error, a timeout, an unknown worker.
    """
    return received(call_now(to, function, args, kwargs, timeout))


def call_now(to: Any, function: str, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
    """Make `remote_call` with the same arguments and errors, for a call that is not a node of a forward."""
    try:
        return _start(rpc.rpc_sync, to, function, args, kwargs, limit=_deadline(to, timeout))
    except RuntimeError as error:
        _raise(error, timeout)


@outside_of_dynamo
def issue_call(to: Any, function: str, args: Args, kwargs: Kwargs, timeout: float | None) -> Future:
    """Start `remote_call` with the same arguments and return its future; never raise, but keep errors for the wait.

    A call to this very process has ended when its future is returned: it may touch objects that the forward uses next,
    and there is no latency to hide.
    """

    def issue() -> Future:
        return _issue(to, timeout, lambda limit: _start(_rpc_async, to, function, args, kwargs, limit=limit))

    flow_control = current_flow_control()
    future = issue() if flow_control is None else flow_control.start(server_name(to), function, (args, kwargs), issue)
    if is_this_process(to):
        with contextlib.suppress(Exception):  # the wait raises it
            future.wait()
    return future


@outside_of_dynamo
def start_call(to: Any, function: str, args: Args, kwargs: Kwargs, timeout: float | None) -> Future:
    """Start a call that the program itself issues, and return its future: `rpc_async`.

    Raises:
        ContractError: no function is known by this name.
        Exception: whatever `rpc_async` raises at once: an unknown worker, arguments that cannot be sent.
    """
    return _watched(to, timeout, lambda limit: _start(_rpc_async, to, function, args, kwargs, limit=limit))


@outside_of_dynamo
def fetch(rref: Any, timeout: float | None) -> Any:
    """Return a copy of the value behind an RRef: `rref.to_here(timeout)`.

    Raises:
        Exception: whatever `to_here` raises, the error of the RRef's creation among it.
    """
    try:
        return received(rref.to_here(_deadline(rref, timeout)))
    except RuntimeError as error:
        _raise(error, timeout)


@outside_of_dynamo
def issue_fetch(rref: Any, timeout: float | None) -> Future:
    """Start `fetch` and return its future; never raise, but keep errors for the wait.

    `to_here` has no asynchronous form; asking the owner for its local value carries the same tensors and the same
    autograd history, but an error of the RRef's creation is wrapped once more, so the wait asks as the program does
    then. An owner gets its own value at once: its identity matters, and nothing travels.
    """
    if getattr(rref, "is_owner", bool)():
        return _issue(rref, timeout, lambda limit: _completed(rref.to_here(limit)))
    local_value = operator.methodcaller("local_value")
    future = _issue(rref, timeout, lambda limit: rpc.rpc_async(rref.owner(), local_value, (rref,), timeout=limit))
    if (forward := current_forward()) is not None:
        forward.fetched[id(future)] = future, rref, timeout
    return future


@outside_of_dynamo
def create(to: Any, function: str, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
    """Start `function` on `to` and return an RRef to its result: `rpc.remote`, or `rref.remote().method`.

    Raises:
        ContractError: no function is known by this name.
        Exception: whatever `rpc.remote` raises.
    """
    return _start(rpc.remote, to, function, args, kwargs, limit=_deadline(to, timeout))


@outside_of_dynamo
def make_rref(value: Any) -> Any:
    """Return an RRef to a value of this very process, from which its receivers fetch the value: `rpc.RRef(value)`.

    Raises:
        Exception: whatever `rpc.RRef` raises, as when there is no RPC agent.
    """
    return rpc.RRef(value)


@outside_of_dynamo
def wait(future: Any) -> Any:
    """Block until an issued call is complete and return its result.

    Raises:
        Exception: what the blocking call would have raised.
    """
    forward = current_forward()
    fetched = None if forward is None else forward.fetched.pop(id(future), None)
    try:
        return received(future.wait())
    except Exception as error:  # noqa: BLE001 - it is raised again, or asked for as the program does
        if fetched is None or str(error).startswith(batch.TIMED_OUT):
            _raise(error, DEADLINES.forget(future))
        _, rref, timeout = fetched
    finally:
        DEADLINES.forget(future)
    return fetch(rref, timeout)


@outside_of_dynamo
def track_gradient(  # noqa: PLR0917 - as all operators: positional, in the documented order
    result: Any, to: Any, gradient: str, args: Args, kwargs: Kwargs, timeout: float | None, index: int
) -> Any:
    """Let a remote result take a gradient, and note where `fxlib.push_gradients` shall send it.

    This returns the result as it is if grad mode is off, if it takes no gradient (integers), or if it already belongs
    to an autograd graph (distributed autograd carries that gradient home by itself). In a tuple, list or dict, each
    tensor is tracked, and the push gets a structure like it, with None for parts without a gradient. `index` is the
    call's position in program order. The other arguments are those of the call that returned the result; the tape keeps
    them as they are now, whatever becomes of the tensors until the push. The result may be written to in place.

    Raises:
        ContractError: there is no tensor in the result, and so no gradient to give to `gradient`.
    """
    return track(result, (to, gradient, args, kwargs, timeout, index), together=False)


@outside_of_dynamo
def send_gradient(  # noqa: PLR0917 - as all operators: positional, in the documented order
    result: Any, to: Any, gradient: str, args: Args, kwargs: Kwargs, timeout: float | None, index: int
) -> Any:
    """Track a gradient as `track_gradient` does, with the same errors, and let it travel with others.

    `fxlib.push_gradients` then sends adjacent pushes to one server in one message, and pushes to several servers side
    by side (`fxlib.runtime.gradients.pushes`).
    """
    return track_together(result, (to, gradient, args, kwargs, timeout, index))


@outside_of_dynamo
def limit_in_flight(calls: int | None, size: int | None) -> None:
    """Limit the messages and the bytes that this forward has in flight to each server from now on; None is no limit.

    Bytes are those of tensors: of a call's arguments, and of the largest result that its function has returned so far.
    """
    if (forward := current_forward()) is not None:
        forward.flow_control = FlowControl(calls, size)


def server_name(to: Any) -> str:
    """Return the name of the worker that a call to `to` reaches; `to` in words if the name is unknown."""
    if isinstance(to, str):
        return to
    if isinstance(to, rpc.WorkerInfo):
        return to.name
    if hasattr(to, "owner_name"):
        return str(to.owner_name())
    try:
        return str(rpc.api._to_worker_info(to).name)
    except (RuntimeError, TypeError, ValueError):
        return str(to)


def is_this_process(to: Any) -> bool:
    """Return whether a call to `to` would run in this very process."""
    if isinstance(to, rpc.PyRRef):
        return to.is_owner()
    return rpc.api._is_current_rpc_agent_set() and _own_name() == server_name(to)


def _own_name() -> str:
    """Return the name of this process; each agent is asked once, since asking takes as long as the rest of a call."""
    agent = torch._C._distributed_rpc._get_current_rpc_agent()
    if _AGENT.known is None or _AGENT.known() is not agent:
        _AGENT.known, _AGENT.name = weakref.ref(agent), rpc.get_worker_info().name
    return _AGENT.name


class _Agent(threading.local):
    """The RPC agent that each thread has asked for the name of this process, and the name."""

    known: weakref.ref[Any] | None = None
    name: str = ""


_AGENT = _Agent()


def _start(start: Starter, to: Any, function: str, args: Args, kwargs: Kwargs, *, limit: float) -> Any:
    if function.startswith("."):
        return rref_proxy._invoke_rpc(to, start, function[1:], limit, *args, **kwargs)
    return start(to, functions.resolve(function), args=args, kwargs=kwargs, timeout=limit)


def _rpc_async(to: Any, function: Any, *, args: Args, kwargs: Kwargs | None = None, timeout: float) -> Future:
    # `rref_proxy._invoke_rpc` has a special case for `rpc.rpc_async` itself: on an RRef of unknown type it would issue
    # from a callback's thread, outside of the caller's autograd context, and the server's gradients would be lost.
    return rpc.rpc_async(to, function, args=args, kwargs=kwargs, timeout=timeout)


def _issue(to: Any, timeout: float | None, start: Callable[[float], Future]) -> Future:
    try:
        return _watched(to, timeout, start)
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the wait
        return _refused(error)


def _deadline(to: Any, timeout: float | None) -> float:
    return DEADLINES.deadline(server_name(to), timeout)


def _watched(to: Any, timeout: float | None, start: Callable[[float], Future]) -> Future:
    server = server_name(to)
    future = start(DEADLINES.deadline(server, timeout))
    DEADLINES.watch(server, timeout, future)
    return future


def _raise(error: Exception, timeout_s: float | None) -> NoReturn:
    """Raise the error of a call as it would be with no time but the call's own."""
    own = in_own_time(error, timeout_s)
    if own is error:
        raise error
    raise own from None


def _completed(value: Any) -> Future:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def _refused(error: Exception) -> Future:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(error)
    if (forward := current_forward()) is not None:
        forward.refused.append(error)
    return future
