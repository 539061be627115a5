"""Times and bytes of one call alone in flight: its issue, the time to its answer, and the wait after that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxlib.profiling.step_samples import CallSample, ForwardSample
from fxlib.runtime.ops.calls import is_call, is_wait, kind_of
from fxlib.runtime.ops.timeline import call_name, reached
from fxlib.runtime.tracking.autograd_node import as_it_is
from fxlib.runtime.tracking.flow_control import tensor_bytes
from fxlib.spec.profile import Opaque, Result, TensorShape
from fxlib.utils.pytree import tensors_in

_ENVELOPE_BYTES = 256
"""Bytes of a message besides tensors and strings: names, structure and headers that `torch.distributed.rpc` adds."""

_MAX_TEXT = 1_000
"""Maximum number of characters of a string that is kept unchanged."""


def timed(node: Node, forward: Callable[[], ForwardSample], made: dict[str, tuple[Any, ...]]) -> Callable[..., Any]:
    """Return a function that replaces the operator of a call, an issue or a wait, and records its times in `forward()`.

    It also records in `made` the arguments with which each call was last made.

    A call in its blocking form is issued and waited for. The answer to a call that the program issues itself is awaited
    at the issue, so that nothing else is ever in flight.
    """
    kind, name = kind_of(node), call_name(node)
    operator: Callable[..., Any] = node.target  # type: ignore[assignment]
    assert kind is not None, node  # noqa: S101 - callers ask is_call, is_issue or is_wait first
    if is_wait(node):

        def waited(*args: Any) -> Any:
            return _waited(operator, args, forward().calls.get(name))

        return waited
    issue = kind.issue if is_call(node) else operator

    def alone(*args: Any, **kwargs: Any) -> Any:
        to, size = reached(node, args, kwargs), message_bytes((args, kwargs))
        made[name] = as_it_is(args)
        start, cpu_s = time.perf_counter(), time.thread_time()
        started = issue(*args, **kwargs)
        issued, cpu_s = time.perf_counter(), time.thread_time() - cpu_s
        sample = CallSample(node=node, to=to, request_bytes=size, issue_s=issued - start, issue_cpu_s=cpu_s)
        forward().calls[name] = sample
        arrived = arrival(started)
        sample.service_s = max(0.0, arrived - issued) if arrived is not None else 0.0
        return _waited(kind.wait, (started,), sample, signals=arrived is not None) if is_call(node) else started

    return alone


def _waited(
    wait: Callable[..., Any], args: tuple[Any, ...], sample: CallSample | None, *, signals: bool | None = None
) -> Any:
    if signals is None:
        signals = bool(args) and hasattr(args[0], "add_done_callback")
    start, cpu_s = time.perf_counter(), time.thread_time()
    result = wait(*args)
    seconds, cpu_s = time.perf_counter() - start, time.thread_time() - cpu_s
    if sample is not None:
        if signals:
            sample.wait_s, sample.wait_cpu_s = seconds, cpu_s
        else:  # nothing shows when its answer arrives, so the whole wait counts as service
            sample.service_s = seconds
        sample.response_bytes, sample.returns = message_bytes(result), structure_of(result)
        sample.is_complete = is_complete(result)
    return result


def arrival(started: Any) -> float | None:
    """Block until an issued call is complete, and return the time of its completion; None if its future cannot tell."""
    if not hasattr(started, "add_done_callback"):
        return None
    at: list[float] = []
    done = threading.Event()

    def landed(_: object) -> None:
        at.append(time.perf_counter())
        done.set()

    started.add_done_callback(landed)
    done.wait()
    return at[0]


def message_bytes(value: object) -> int:
    """Return the size of a message that carries nested values, in bytes."""
    return _ENVELOPE_BYTES + sum(map(_leaf_bytes, pytree.tree_leaves(value)))


def value_bytes(value: object) -> int:
    """Return the memory of the tensors in nested values, in bytes."""
    return sum(map(tensor_bytes, tensors_in(value)))


def structure_of(value: object) -> Result:
    """Return the structure of a result. Leaves other than tensors, numbers and strings become None."""
    match value:
        case torch.Tensor():
            return TensorShape(shape=tuple(value.shape), dtype=value.dtype, requires_grad=value.requires_grad)
        case tuple():
            return tuple(map(structure_of, value))
        case list():
            return list(map(structure_of, value))
        case dict() if all(isinstance(name, str) for name in value):
            return {str(name): structure_of(each) for name, each in value.items()}
        case bool() | int() | float():
            return Opaque(value=_plain(value))
        case str() if _can_travel(value):
            return Opaque(value="".join(value))
        case _:
            return Opaque()


def is_complete(value: object) -> bool:
    """Return whether `structure_of` describes everything in a result except the values of its tensors."""
    match value:
        case tuple() | list():
            return type(value) in {tuple, list, torch.Size} and all(map(is_complete, value))
        case dict():
            return all(isinstance(name, str) and is_complete(each) for name, each in value.items())
        case str():
            return _can_travel(value)
        case torch.Tensor():
            return value.layout == torch.strided
        case _:
            return value is None or isinstance(value, (bool, int, float))


def _plain(number: float) -> float:
    """Return a number as one of Python's own types, since those of enums and NumPy cannot be sent."""
    return next(each(number) for each in (bool, int, float) if isinstance(number, each))


def _can_travel(text: str) -> bool:
    return len(text) <= _MAX_TEXT and not any("\ud800" <= each <= "\udfff" for each in text)


def _leaf_bytes(leaf: object) -> int:
    if isinstance(leaf, torch.Tensor):
        return tensor_bytes(leaf)
    return len(leaf) if isinstance(leaf, (str, bytes)) else 8
