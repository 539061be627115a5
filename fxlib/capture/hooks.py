"""Which functions a capture intercepts, and what it does in their place."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import rref_proxy
from torch.fx import Proxy

from fxlib.capture import source
from fxlib.capture.intercept import Call, Hook, Interception
from fxlib.capture.tracer import RemoteTracer
from fxlib.capture.values import IN_PLACE, CollectedFutures
from fxlib.errors import CaptureError

_STYLES = {rpc.rpc_sync: "sync", rpc.rpc_async: "async", rpc.remote: "remote"}
_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (threading.Thread.start, "the forward starts a thread, whose work no graph can hold", "Issue calls with rpc_async."),
    (ThreadPoolExecutor.submit, "the forward hands work to threads, which no graph can hold", "Issue calls with rpc_async."),
    (torch.random.manual_seed, "the forward seeds the random generator", "Seed it before the forward."),
    (torch.random.set_rng_state, "the forward sets the state of the random generator", "Set it before the forward."),
    (torch.inference_mode.__enter__, "an inference_mode block cannot be recorded", "Use torch.no_grad()."),
)


def install(interception: Interception, tracer: RemoteTracer, wrapped: Iterable[Callable[..., Any]]) -> None:
    """Put all hooks of a capture in place.

    Raises:
        CaptureError: `wrapped` holds something that is not a Python function.
    """
    _install_rpc(interception, tracer)
    _install_rrefs(interception, tracer)
    _install_autocast(interception, tracer)
    for function, problem, hint in _REFUSED:
        interception.function(function, _refusal(problem, hint))
    interception.function(nn.Module.__setattr__, _assignment(tracer))
    interception.function(torch.autograd.Function.apply.__func__, _custom_function(tracer))
    for function in wrapped:
        if not isinstance(function, FunctionType):
            raise CaptureError(f"{function!r} is no Python function", where="wrap", hint="Wrap it in one.")
        interception.function(function, _leaf(tracer, function))


def _install_rpc(interception: Interception, tracer: RemoteTracer) -> None:
    calls = tracer.calls
    for function, style in _STYLES.items():
        interception.function(function, lambda _, args, kwargs, style=style: calls.call(style, *args, **_renamed(kwargs)))
    interception.function(
        rref_proxy._invoke_rpc,
        lambda _, args, kwargs: calls.method_call(_STYLES[args[1]], args[0], args[2], args[4:], kwargs, args[3]),  # type: ignore[arg-type]
    )
    interception.function(rpc.get_worker_info, _worker_info(tracer))
    interception.function(torch.futures.wait_all, lambda _, args, kwargs: [f.wait() for f in _only(args, kwargs)])
    interception.function(
        torch.futures.collect_all, lambda _, args, kwargs: CollectedFutures(list(_only(args, kwargs)))
    )


def _install_rrefs(interception: Interception, tracer: RemoteTracer) -> None:
    calls = tracer.calls
    for method, style in (("rpc_sync", "sync"), ("rpc_async", "async"), ("remote", "remote")):
        interception.method(
            rpc.PyRRef,
            method,
            lambda _, args, kwargs, style=style: calls.method_calls(style, *args, **kwargs),
        )
    interception.method(rpc.PyRRef, "to_here", lambda _, args, kwargs: calls.fetch(*args, **kwargs))
    for method in ("local_value", "confirmed_by_owner"):
        interception.method(rpc.PyRRef, method, _on_node(tracer, method))
    interception.method(rpc.PyRRef, "backward", _refusal("the forward runs a backward", "Run it in the training step."))
    interception.method(rpc.PyRRef, "__init__", _rref_to_traced)


def _install_autocast(interception: Interception, tracer: RemoteTracer) -> None:
    entered: list[Proxy] = []

    def enter(original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = args[0]
        mode = (block.device, block.fast_dtype, block._enabled, block._cache_enabled)
        entered.append(tracer.create_proxy("call_function", torch.amp.autocast_mode._enter_autocast, mode, {}))
        return original(*args, **kwargs)

    def leave(original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracer.create_proxy("call_function", torch.amp.autocast_mode._exit_autocast, (entered.pop(),), {})
        return original(*args, **kwargs)

    interception.function(torch.autocast.__enter__, enter)
    interception.function(torch.autocast.__exit__, leave)


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"function" if name == "func" else name: value for name, value in kwargs.items()}


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["futures"]


def _worker_info(tracer: RemoteTracer) -> Hook:
    return lambda _, args, kwargs: tracer.create_proxy(
        "call_function", rpc.get_worker_info, tuple(args) or tuple(kwargs.values()), {}
    )


def _on_node(tracer: RemoteTracer, method: str) -> Hook:
    return lambda _, args, kwargs: tracer.create_proxy(
        "call_method", method, (tracer.rref(args[0]), *args[1:]), kwargs
    )


def _rref_to_traced(original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
        raise CaptureError(
            "the forward makes an RRef to a traced value", where=source.here(), hint="Send the value itself."
        )
    return original(*args, **kwargs)


def _assignment(tracer: RemoteTracer) -> Hook:
    def assign(original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, name, value = args
        if not isinstance(value, Proxy) and not source.is_users(sys._getframe(3).f_code):  # torch.fx keeps a constant
            tracer.added.append(name)
            return original(*args, **kwargs)
        if _is_written_in_place(getattr(module, name, None), value):
            return None
        raise CaptureError(
            f"the forward assigns {type(module).__name__}.{name}, so one step would depend on the last",
            where=source.here(),
            hint="Return the value instead, or write to a buffer in place.",
        )

    return assign


def _is_written_in_place(before: object, value: object) -> bool:
    """Whether this is the end of `self.count += 1`: Python assigns what the buffer itself has become."""
    if not (isinstance(before, Proxy) and isinstance(value, Proxy)):
        return before is value and value is not None
    node: Any = value.node
    while node is not before.node and node.target in IN_PLACE:
        node = node.args[0]
    return node is before.node


def _refusal(problem: str, hint: str) -> Hook:
    def refuse(original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise CaptureError(problem, where=source.here(), hint=hint)

    return refuse


def _custom_function(tracer: RemoteTracer) -> Hook:
    """A `torch.autograd.Function` stays one node: traced through, its backward would be lost."""
    kept: dict[type, Callable[..., Any]] = {}

    def apply(original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cls, *rest = args
        function = kept.setdefault(cls, _named(f"{cls.__name__}_apply", cls))
        return tracer.create_proxy("call_function", function, tuple(rest), kwargs, name=cls.__name__)

    return apply


def _named(name: str, cls: Any) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    # Generated code finds a function by this name; that of the method would be looked for in torch.
    apply.__name__ = apply.__qualname__ = name
    apply.__module__ = cls.__module__
    return apply


def _leaf(tracer: RemoteTracer, function: FunctionType) -> Hook:
    signature = inspect.signature(function)

    def record(original: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature.bind(*args, **kwargs)  # a wrong call is an error now, as it would be without a tracer
        return tracer.create_proxy("call_function", function, args, kwargs)

    return record
