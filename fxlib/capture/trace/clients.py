"""Record the calls of registered clients: each call, issue and wait becomes one node, whose target is the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Proxy

from fxlib.capture.intercept import Interception, Replace
from fxlib.capture.trace.tracer import RemoteTracer
from fxlib.capture.trace.values import FutureValue, value_of
from fxlib.runtime.ops.calls import CallKind, kinds, signature_of
from fxlib.spec.contract import Contract


def install(interception: Interception, tracer: RemoteTracer) -> None:
    """Record the functions of all registered clients for one capture."""
    waits: set[Callable[..., Any]] = set()
    for kind in kinds():
        if kind.is_client and kind.blocking is not None:
            interception.function(kind.blocking, _call(tracer, kind))
            interception.function(kind.issue, _issue(tracer, kind))
            if kind.wait not in waits:  # several kinds may share one
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
    signature_of(function).bind(*args, **kwargs)  # a wrong call is an error now, as it would be without a tracer
    name = kind.function.rpartition(":")[2]
    contract, values = tracer.calls.contract_of_client(kind), tracer.calls.values
    hint = name if function is kind.blocking else f"issue_{name}"
    return tracer.calls.emit(function, tuple(values(args)), hint, contract, dict(values(kwargs)))


def _structured(result: Proxy, contract: Contract | None) -> Any:
    return value_of(result, contract.structure if contract is not None else None)
