"""What tracking a gradient asks of tensors: a leaf that may yet be written to, and arguments kept as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from typing_extensions import override


class _Alias(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @override
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def writable(leaf: torch.Tensor) -> torch.Tensor:
    """Return the same tensor as no leaf: torch lets nobody write to a leaf in place. Its gradient arrives unchanged."""
    alias: torch.Tensor = _Alias.apply(leaf)  # type: ignore[no-untyped-call]
    return alias


def as_it_is(value: Any) -> Any:
    """Return a value that later writes to the tensors in it do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(map(as_it_is, value))
    if type(value) is dict:
        return {name: as_it_is(each) for name, each in value.items()}
    return value
