"""Make values that arrive or leave in one message as independent as if each had a message of its own.

`torch.distributed.rpc` sends once what a message holds twice, be it a tensor or the memory of tensors that overlap.
Without this module, a call would see what another call writes to an argument that they share, and a trainer would see
in one result what it writes to another.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch.distributed import rpc
from torch.distributed.rpc import internal
from typing_extensions import override

from fxlib.batch.autograd_context import in_autograd_context
from fxlib.batch.known_rows import KnownRows

Value = TypeVar("Value")
_CONTAINERS = frozenset({tuple, list, dict, OrderedDict})
_PLAIN = frozenset(
    {str, bytes, int, float, complex, bool, type(None), type, slice, FunctionType, BuiltinFunctionType}
    | {torch.dtype, torch.device, torch.Size, rpc.WorkerInfo, rpc.PyRRef, rpc.RRef, internal.RemoteException}
)
"""Classes of values through which nobody sees what another one writes."""


def isolated(values: Sequence[Value]) -> list[Value]:
    """Return the values so that no two have memory or a mutable object in common: what they would share is copied.

    The function looks into tuples, lists and dicts. A value that holds an object of any other class is copied as if it
    travelled once more. What a single value holds twice stays one object.
    """
    if len(values) < 2 or _nothing_twice(values):
        return list(values)
    taken: dict[int, int] = {}
    return [_Own(taken).of(value if _is_seen_through(value) else _independent(value)) for value in values]


def _nothing_twice(values: Sequence[object]) -> bool:
    """Return whether it is plain that no memory and no object occurs twice, which is quickly seen for most messages."""
    met: set[int] = set()
    ahead: list[Any] = list(values)
    while ahead:
        value = ahead.pop()
        kind = type(value)
        if kind in _PLAIN or (kind is tuple and not value):  # a process has one empty tuple
            continue
        if kind is torch.Tensor and value.layout is torch.strided:
            key = value.untyped_storage()._cdata
        elif kind in _CONTAINERS or _is_named_tuple(value):
            key = id(value)
            ahead.extend(value.values() if isinstance(value, dict) else value)
        elif kind is KnownRows:
            key = id(value)
            ahead.extend(value.tensors)
        else:
            return False
        if key in met:
            return False
        met.add(key)
    return True


def _is_seen_through(value: object) -> bool:
    """Return whether `_Own` looks into everything that a value holds."""
    met: set[int] = set()
    ahead: list[Any] = [value]
    while ahead:
        each = ahead.pop()
        kind = type(each)
        if kind in _CONTAINERS or _is_named_tuple(each):
            if id(each) not in met:  # a few tuples in tuples may stand for more values than anybody could look at
                met.add(id(each))
                ahead.extend(each.values() if isinstance(each, dict) else each)
        elif not (kind in _PLAIN or kind is torch.Tensor or kind is torch.nn.Parameter):
            return False
    return True


def _independent(value: Value) -> Value:
    try:
        sent: Value = as_sent(value)
    except Exception:  # noqa: BLE001 - the message itself fails then
        return value
    return sent


class _Own:
    """Makes one of the values independent of those before it.

    Args:
        taken: how far, in bytes, other values use each memory, by the address of a storage.
    """

    def __init__(self, taken: dict[int, int]) -> None:
        self._taken = taken
        self._claimed: dict[int, int] = {}
        self._memo: dict[int, Any] = {}
        self._given: dict[int, tuple[object, Any]] = {}  # holds the objects, too, so that their ids stay theirs

    def of(self, value: Value) -> Value:
        given = self._own(value)
        self._taken.update(self._claimed)
        return given

    def _own(self, value: Any) -> Any:
        kind = type(value)
        is_tensor = isinstance(value, torch.Tensor)
        is_named = _is_named_tuple(value)
        if not is_tensor and not is_named and kind not in _CONTAINERS:
            return value
        known = self._given.get(id(value))
        if known is not None:
            return known[1]
        if is_tensor:
            given = self._tensor(value)
        elif is_named:
            given = kind._make(map(self._own, value))
        elif kind is tuple or kind is list:
            given = kind([self._own(each) for each in value])
        else:
            given = kind((key, self._own(each)) for key, each in value.items())
        self._given[id(value)] = value, given
        return given

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:  # it may share its indices or values, which are not looked at
            return copied(tensor, self._memo)
        key, begin, end = _memory(tensor)
        if begin < self._taken.get(key, 0):
            return copied(tensor, self._memo)
        self._claimed[key] = max(end, self._claimed.get(key, 0))
        return tensor


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make")


def _memory(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of a strided tensor's storage, and bounds of its elements in it, in bytes: begin and end."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    return storage._cdata, begin, begin + tensor.numel() * size if tensor.is_contiguous() else int(storage.nbytes())


_SENT_AS_IT_IS = frozenset({str, int, float, bool, type(None)})
_LARGE_BYTES = 8 * 1024


def as_sent(value: Any) -> Any:
    """Return a result as it would arrive if it were sent now; raise if it cannot be sent."""
    if type(value) in _SENT_AS_IT_IS:
        return value
    if type(value) is torch.Tensor:
        return copied(value, {})
    if type(value) is list and _SENT_AS_IT_IS.issuperset(map(type, value)):
        return list(value)
    serialized, tensors = _serialized(value)
    memo: dict[int, Any] = {}
    return internal.deserialize(serialized, [copied(each, memo) for each in tensors])


def sendable(value: Any) -> Any:
    """Return a result; raise if it cannot be sent, since the whole message with all earlier results would fail, too."""
    if not _is_surely_sent(value) and not (type(value) is list and all(map(_is_surely_sent, value))):
        _serialized(value)
    return value


def _is_surely_sent(value: object) -> bool:
    return type(value) in _SENT_AS_IT_IS or type(value) is torch.Tensor


def _serialized(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    try:
        serialized, tensors = internal.serialize(value)
    except Exception as error:  # whatever its kind: a single call would raise a RuntimeError
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return serialized, tensors


def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a tensor as it would arrive: gaps, repetitions and overlaps in memory travel with it.

    In a context of distributed autograd, gradients of the copy go where the tensor's go.

    Args:
        tensor: a tensor of a value.
        memo: the memo of `copy.deepcopy` for all tensors of the value, whose copies share memory where the tensors do.
    """
    if tensor.layout is not torch.strided:
        return tensor.clone()
    if tensor.is_conj():
        return copied(tensor.conj(), memo).conj()
    if tensor.is_neg():
        return torch._neg_view(copied(torch._neg_view(tensor), memo))
    held, used = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
    if held >= _LARGE_BYTES and held >= 2 * used:  # `torch.distributed.rpc` sends just the piece of a large storage
        return tensor.clone()
    made: torch.Tensor
    if type(tensor) is torch.Tensor and tensor.requires_grad and in_autograd_context():
        made = _Copy.apply(tensor, memo)  # type: ignore[no-untyped-call]
        return made
    made = copy.deepcopy(tensor if tensor.is_leaf else tensor.detach(), memo)
    return made if made.requires_grad == tensor.requires_grad else made.requires_grad_()


class _Copy(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(tensor.detach(), memo)

    @override
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None
