"""The sizes of messages: the bytes of arguments and results, and the structure of a result."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from fxlib.runtime.tracking.flow_control import tensor_bytes
from fxlib.spec.profile import Opaque, Result, TensorShape

ENVELOPE_BYTES = 256
"""Bytes of a message besides tensors and texts: names, structure, headers, as `torch.distributed.rpc` adds them."""

_MAX_TEXT = 1_000
"""The largest number of characters of a text that is kept unchanged."""


def message_bytes(value: object) -> int:
    """Return the size of a message that carries a nest of values."""
    return ENVELOPE_BYTES + sum(map(_leaf_bytes, pytree.tree_leaves(value)))


def value_bytes(value: object) -> int:
    """Return the memory of the tensors in a nest of values."""
    return sum(tensor_bytes(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def structure_of(value: object) -> Result:
    """Return the structure of a result. What is neither tensor, number, text nor a nest of such becomes None."""
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


def is_told(value: object) -> bool:
    """Whether `structure_of` describes all of a result except the values of its tensors."""
    match value:
        case tuple() | list():
            return type(value) in {tuple, list, torch.Size} and all(map(is_told, value))
        case dict():
            return all(isinstance(name, str) and is_told(each) for name, each in value.items())
        case str():
            return _can_travel(value)
        case torch.Tensor():
            return value.layout == torch.strided
        case _:
            return value is None or isinstance(value, (bool, int, float))


def _plain(number: float) -> float:
    """Return a number as one of Python's own types: an enum's or NumPy's cannot be sent."""
    return next(each(number) for each in (bool, int, float) if isinstance(number, each))


def _can_travel(text: str) -> bool:
    return len(text) <= _MAX_TEXT and not any("\ud800" <= each <= "\udfff" for each in text)


def _leaf_bytes(leaf: object) -> int:
    if isinstance(leaf, torch.Tensor):
        return tensor_bytes(leaf)
    return len(leaf) if isinstance(leaf, (str, bytes)) else 8
