"""What tracking a gradient asks of tensors: a leaf that may be written to all the same, and arguments kept as they are."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable
from typing_extensions import override

Value = TypeVar("Value")


class _Alias(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return leaf.detach()

    @override
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def writable(leaf: torch.Tensor) -> torch.Tensor:
    """Return the same tensor as no leaf: torch lets nobody write to a leaf in place. Its gradient arrives unchanged."""
    alias: torch.Tensor = _Alias.apply(leaf)
    return alias


def as_it_is(value: Value) -> Value:
    """Return a value that later writes to the tensors in it do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # type: ignore[return-value]
    if type(value) in (tuple, list):
        return type(value)(map(as_it_is, value))  # type: ignore[call-arg,arg-type]
    if type(value) is dict:
        return {name: as_it_is(each) for name, each in value.items()}  # type: ignore[return-value]
    return value
