"""Keep the arguments of a tracked call unchanged, and gradients in memory that nobody else can write to."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from fxlib.utils.pytree import mapped

_PLAIN = frozenset({str, int, float, bool, type(None)})


def as_it_is(value: Any) -> Any:
    """Return a value that does not change when the program later writes to its tensors."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return tuple([each if type(each) in _PLAIN else as_it_is(each) for each in value])
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.requires_grad else value.clone()
    if kind is list:
        return [each if type(each) in _PLAIN else as_it_is(each) for each in value]
    if kind is dict:
        return {name: as_it_is(each) for name, each in value.items()}
    try:
        return mapped(lambda each: as_it_is(each) if isinstance(each, torch.Tensor) else each, value)
    except RecursionError:  # an object that holds itself
        return value


def owned(gradient: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Return a gradient in memory that nobody else can write to: its own, or else that of a copy.

    A gradient owns its memory if no other tensor and no other object refers to the storage. The caller has made sure
    that nobody else holds `gradient` itself.

    Args:
        gradient: as backward brought it.
        strides: strides of the result in elements: those of the tensor whose gradient it is, as torch has it for
            leaves; None if that tensor is contiguous.
    """
    if gradient.layout is torch.strided and (
        gradient.is_contiguous() if strides is None else gradient.stride() == strides
    ):
        storage = gradient.untyped_storage()
        by_tensors = torch._C._storage_Use_Count(storage._cdata) - 1  # without the reference of `storage`
        if by_tensors == 1 and sys.getrefcount(storage) == _references_of_a_tensors_own():
            return gradient
    return copied(gradient, strides)


def copied(gradient: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Return a copy of a gradient with these strides; None means contiguous."""
    if gradient.layout is not torch.strided:
        return gradient.detach().clone()
    if strides is None:
        return gradient.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


@functools.cache
def _references_of_a_tensors_own() -> int:
    """Return `sys.getrefcount` of a storage to which only one tensor and a local variable refer.

    Versions of torch differ: in some, the tensor refers to the storage's Python object, too.
    """
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)
