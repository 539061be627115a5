"""Recording of functional collectives: `torch.distributed._functional_collectives`, and the operators below it.

The result of a functional collective is waited for at its first use, as with torch's `AsyncCollectiveTensor`, so that a
captured program issues and waits where the program itself does.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.distributed import _functional_collectives as functional
from torch.fx import Proxy

from fxlib.capture.intercept import Call, Interception, suspended
from fxlib.capture.trace.tracer import RemoteTracer
from fxlib.capture.trace.values import CollectiveValue, StructuredValue
from fxlib.runtime.ops import collectives

_OPERATORS = torch.ops._c10d_functional


def install(interception: Interception, tracer: RemoteTracer) -> None:
    """Record functional collectives for one capture."""
    recorder = _Recorder(tracer)
    tracer.recorders |= {_OPERATORS.wait_tensor: recorder.wait, _OPERATORS.wait_tensor.default: recorder.wait}
    for name, overload in collectives.OPERATIONS.items():
        record = recorder.of(name, overload)
        tracer.recorders |= {overload: record, getattr(_OPERATORS, name): record}
    interception.function(functional._maybe_wrap_tensor, _unless_traced)
    interception.function(functional._resolve_group, _unrecorded)
    interception.function(functional.all_gather_single, lambda _: recorder.all_gather)
    interception.function(functional.reduce_scatter_single, lambda _: recorder.reduce_scatter)


class _Recorder:
    """Records collectives as calls of the operators in `fxlib.runtime.ops.collectives`."""

    def __init__(self, tracer: RemoteTracer) -> None:
        self._tracer = tracer

    def of(self, name: str, overload: Any) -> Call:
        """Return the function that records one operator."""
        names = [argument.name for argument in overload._schema.arguments]

        def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bound = dict(zip(names, args, strict=False)) | kwargs
            if bound.keys() != set(names):
                raise TypeError(f"{name}() takes {', '.join(names)}, and was given {', '.join(bound)}")
            return self._record(name, tuple(_plain(bound[each]) for each in names))

        return record

    def _record(self, name: str, args: tuple[Any, ...]) -> Any:
        calls = self._tracer.calls
        if isinstance(args[0], (tuple, list)):
            inputs = list(args[0])
            result = calls.emit(collectives.collective, (name, (inputs, *args[1:])), name, None)
            return StructuredValue(result.node, self._tracer, [None] * len(inputs))
        issued = calls.emit(collectives.issue_collective, (name, args), f"issue_{name}", None)
        return CollectiveValue(issued)

    def wait(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record `wait_tensor`: a collective of this capture is waited for once; a complete tensor is returned."""
        value = args[0] if args else kwargs["tensor"]
        if isinstance(value, CollectiveValue):
            return value.wait()
        if isinstance(value, Proxy) and self._is_complete(value):
            return value
        return NotImplemented

    def _is_complete(self, value: Proxy) -> bool:
        """Return whether a tensor is the result of a coalesced collective, or has been waited for."""
        made = value.node.args[0] if value.node.target is operator.getitem else value.node
        return getattr(made, "target", None) in (collectives.collective, collectives.wait_collective)

    def all_gather(self, self_: Any, gather_dim: int, group: Any, tag: str = "") -> Any:
        """Do what torch's own function does, without reading shapes."""
        name, size = self._group(group, tag)
        result = _OPERATORS.all_gather_into_tensor(self_, size, name)
        return result if gather_dim == 0 else torch.cat(torch.chunk(result, size, dim=0), dim=gather_dim)

    def reduce_scatter(self, self_: Any, reduce_op: str, scatter_dim: int, group: Any, tag: str = "") -> Any:
        """Do what torch's own function does, without reading shapes."""
        name, size = self._group(group, tag)
        if scatter_dim != 0:
            self_ = torch.cat(torch.chunk(self_, size, dim=scatter_dim))
        return _OPERATORS.reduce_scatter_tensor(self_, reduce_op.lower(), size, name)

    @staticmethod
    def _group(group: Any, tag: str) -> tuple[str, int]:
        resolved = functional._resolve_group(group, tag)
        with suspended():
            return str(_plain(resolved)), torch.distributed.distributed_c10d._get_group_size_by_name(resolved)


def _plain(value: Any) -> Any:
    """Return the name of a process group, which is the same in all members, and any other value unchanged."""
    return value.group_name if isinstance(value, torch.distributed.ProcessGroup) else value


def _unless_traced(original: Call) -> Call:
    def wrap(value: Any) -> Any:
        return value if isinstance(value, Proxy) else original(value)

    return wrap


def _unrecorded(original: Call) -> Call:
    def resolve(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            return original(*args, **kwargs)

    return resolve
