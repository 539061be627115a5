"""The functions that a trace replaces: those that make remote calls, those of clients, and those that stay one node.

Each call, issue and wait of a registered client becomes one node whose target is the function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import _RemoteModule
from torch.distributed.rpc import rref_proxy
from torch.fx import Proxy
from torch.utils.checkpoint import CheckpointFunction

from fxlib.capture import source
from fxlib.capture.handled_errors import capture_error
from fxlib.capture.intercept import Call, Interception, Replace
from fxlib.capture.trace import collectives, refusals
from fxlib.capture.trace.remote import Style
from fxlib.capture.trace.tracer import RemoteTracer
from fxlib.capture.trace.values import CollectedFutures, FutureValue, value_of
from fxlib.errors import CaptureError
from fxlib.runtime.ops.calls import CallKind, kinds, signature_of
from fxlib.spec.contract import Contract

STYLES: dict[Call, Style] = {rpc.rpc_sync: "sync", rpc.rpc_async: "async", rpc.remote: "remote"}
_AUTOCAST_QUESTIONS = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled", "get_autocast_gpu_dtype")
METHODS: dict[str, Style] = {"rpc_sync": "sync", "rpc_async": "async", "remote": "remote"}


def install(interception: Interception, tracer: RemoteTracer, wrapped: Iterable[Callable[..., Any]]) -> None:
    """Install all replacements for one capture.

    Raises:
        CaptureError: `wrapped` holds something that is not a Python function.
    """
    _install_rpc(interception, tracer)
    _install_rrefs(interception, tracer)
    _install_autocast(interception, tracer)
    _install_clients(interception, tracer)
    collectives.install(interception, tracer)
    refusals.install(interception, tracer)
    apply: Any = torch.autograd.Function.apply
    interception.function(apply.__func__, _custom_function(tracer))
    for function in wrapped:
        if not isinstance(function, FunctionType):
            raise CaptureError(f"{function!r} is no Python function", where="wrap", hint="Wrap it in one.")
        interception.function(function, _leaf(tracer, function))


def _install_rpc(interception: Interception, tracer: RemoteTracer) -> None:
    calls = tracer.calls

    def call(style: Style) -> Replace:
        return lambda _: (
            lambda to, func, args=None, kwargs=None, timeout=None: calls.call(
                style, to, func, args, kwargs, timeout=timeout
            )
        )

    def invoke(rref: Any, api: Call, method: str, timeout: Any, *args: Any, **kwargs: Any) -> Any:
        return calls.method_call(STYLES[api], rref, method, args, kwargs, timeout=timeout)

    def worker_info(worker_name: Any = None) -> Proxy:
        args = () if worker_name is None else (worker_name,)
        return tracer.create_proxy("call_function", rpc.get_worker_info, args, {})

    for function, style in STYLES.items():
        interception.function(function, call(style))
    interception.function(rref_proxy._invoke_rpc, lambda _: invoke)
    interception.function(rpc.get_worker_info, lambda _: worker_info)
    interception.function(torch.futures.wait_all, lambda _: lambda futures: [each.wait() for each in futures])
    interception.function(torch.futures.collect_all, lambda _: lambda futures: CollectedFutures(list(futures)))


def _install_rrefs(interception: Interception, tracer: RemoteTracer) -> None:
    calls = tracer.calls
    for name, style in METHODS.items():
        helper = functools.partial(calls.method_calls, style)
        interception.method(rpc.PyRRef, name, functools.partial(_in_place_of, helper))
    interception.method(rpc.PyRRef, "to_here", lambda _: calls.fetch)
    interception.method(rpc.RRef, "__new__", lambda original: functools.partial(rref_to, calls.own, original))
    for name in ("local_value", "confirmed_by_owner"):
        interception.method(rpc.PyRRef, name, _on_node(tracer, name))
    hide_remote_modules(interception)


def rref_to(own: Call, original: Call, kind: type, value: Any, type_hint: Any = None) -> Any:
    """Record `rpc.RRef(x)` of a traced value, or of a tensor, with `own`."""
    if isinstance(value, (Proxy, torch.Tensor)) and type_hint is None:
        return own(value)
    return original(kind, value, type_hint)


def hide_remote_modules(interception: Interception) -> None:
    """Let a `RemoteModule` report that it has no modules and no state; otherwise it raises an error in this process."""
    for method in (_RemoteModule.named_modules, _RemoteModule.named_children, _RemoteModule.children):
        interception.function(method, lambda _: lambda *_, **__: iter(()))
    interception.function(_RemoteModule.state_dict, lambda _: lambda *_, **__: None)


def _install_autocast(interception: Interception, tracer: RemoteTracer) -> None:
    entered: list[Proxy] = []

    def enter(original: Call) -> Call:
        def replacement(block: Any) -> Any:
            mode = (block.device, block.fast_dtype, block._enabled, block._cache_enabled)
            entered.append(tracer.create_proxy("call_function", torch.amp.autocast_mode._enter_autocast, mode, {}))
            return original(block)

        return replacement

    def leave(original: Call) -> Call:
        def replacement(*args: Any) -> Any:
            tracer.create_proxy("call_function", torch.amp.autocast_mode._exit_autocast, (entered.pop(),), {})
            return original(*args)

        return replacement

    def ask(original: Call) -> Call:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not entered and source.is_users(sys._getframe(2)):
                raise capture_error(
                    "the forward asks for the mode of autocast around it, and runs may differ in it",
                    hint="Make what asks a leaf with wrap=, or enter autocast in the forward.",
                )
            return original(*args, **kwargs)

        return replacement

    for name in _AUTOCAST_QUESTIONS:
        if name in torch.__dict__:
            interception.method(torch, name, ask)
    interception.function(torch.autocast.__enter__, enter)
    interception.function(torch.autocast.__exit__, leave)


def _in_place_of(replacement: Call, _: Call) -> Call:
    return replacement


def _on_node(tracer: RemoteTracer, name: str) -> Replace:
    return lambda _: (
        lambda rref, *args, **kwargs: tracer.create_proxy("call_method", name, (tracer.rref(rref), *args), kwargs)
    )


def _custom_function(tracer: RemoteTracer) -> Replace:
    """Keep a `torch.autograd.Function` as one node; tracing through it would lose its backward."""
    kept: dict[type, Call] = {}

    def replacement(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and torch.is_grad_enabled():
            raise refusals.reentrant_checkpoint()
        function = kept.setdefault(cls, _named(f"{cls.__name__}_apply", cls))
        return tracer.create_proxy("call_function", function, args, kwargs, name=cls.__name__)

    return lambda _: replacement


def _named(name: str, cls: Any) -> Call:
    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    # Generated code finds a function by this name; the method's own name, or one in torch, would be looked up there.
    apply.__name__ = apply.__qualname__ = name
    apply.__module__ = __name__ if cls.__module__.startswith("torch.") else cls.__module__
    apply.__wrapped__ = cls.apply  # type: ignore[attr-defined]  # it is the same in every capture
    return apply


def _leaf(tracer: RemoteTracer, function: FunctionType) -> Replace:
    signature = inspect.signature(function)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)  # a wrong call raises its error now, as without a tracer
        return tracer.create_proxy("call_function", function, args, kwargs)

    return lambda _: replacement


def _install_clients(interception: Interception, tracer: RemoteTracer) -> None:
    """Record the functions of all registered clients for one capture."""
    waits: set[Callable[..., Any]] = set()
    for kind in kinds():
        if kind.is_client and kind.blocking is not None:
            interception.function(kind.blocking, _call(tracer, kind))
            interception.function(kind.issue, _issue(tracer, kind))
            if kind.wait not in waits:  # several kinds may share one wait
                waits.add(kind.wait)
                interception.function(kind.wait, _wait(tracer, kind))


def _call(tracer: RemoteTracer, kind: CallKind) -> Replace:
    def call(*args: Any, **kwargs: Any) -> Any:
        contract = tracer.calls.contract_of_client(kind)
        result = _emit(tracer, kind, kind.blocking, (args, kwargs))
        return _structured(result, contract)

    return lambda _: call


def _issue(tracer: RemoteTracer, kind: CallKind) -> Replace:
    def issue(*args: Any, **kwargs: Any) -> FutureValue:
        contract = tracer.calls.contract_of_client(kind)
        issued = _emit(tracer, kind, kind.issue, (args, kwargs))
        return FutureValue(
            issued.node,
            tracer,
            lambda future: _structured(tracer.calls.emit_wait(kind.wait, future), contract),
        )

    return lambda _: issue


def _wait(tracer: RemoteTracer, kind: CallKind) -> Replace:
    def wait(future: Any) -> Any:
        if isinstance(future, FutureValue):
            return future.wait()
        return tracer.create_proxy("call_function", kind.wait, (tracer.calls.values(future),), {})

    return lambda _: wait


def _emit(tracer: RemoteTracer, kind: CallKind, function: Any, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Proxy:
    args, kwargs = given
    signature_of(function).bind(*args, **kwargs)  # a wrong call raises its error now, as without a tracer
    name = kind.function.rpartition(":")[2]
    contract = tracer.calls.contract_of_client(kind)
    values = functools.partial(tracer.calls.values, by_client=True)
    if function is not kind.blocking:
        tracer.calls.in_flight((*args, *kwargs.values()))
    hint = name if function is kind.blocking else f"issue_{name}"
    return tracer.calls.emit(function, tuple(values(args)), hint, contract, dict(values(kwargs)))


def _structured(result: Proxy, contract: Contract | None) -> Any:
    return value_of(result, contract.structure if contract is not None else None)
