"""Decompositions by name, for those who cannot send functions. They take what the operator itself takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + torch.tanh(inner))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _silu(x: Tensor, *, inplace: bool = False) -> Any:
    return NotImplemented if inplace else x * torch.sigmoid(x)


def _mish(x: Tensor, *, inplace: bool = False) -> Any:
    return NotImplemented if inplace else x * torch.tanh(F.softplus(x))


def _hardswish(x: Tensor, *, inplace: bool = False) -> Any:
    return NotImplemented if inplace else x * torch.clamp(x + 3, 0, 6) / 6


def _leaky_relu(x: Tensor, negative_slope: float = 0.01, *, inplace: bool = False) -> Any:
    return NotImplemented if inplace else torch.where(x >= 0, x, x * negative_slope)


DECOMPOSITIONS: Mapping[str, Mapping[Any, Callable[..., Any]]] = {
    "gelu": {F.gelu: _gelu, torch.ops.aten.gelu: _gelu},
    "silu": {F.silu: _silu, torch.ops.aten.silu: _silu},
    "mish": {F.mish: _mish, torch.ops.aten.mish: _mish},
    "hardswish": {F.hardswish: _hardswish, torch.ops.aten.hardswish: _hardswish},
    "leaky_relu": {F.leaky_relu: _leaky_relu, torch.ops.aten.leaky_relu: _leaky_relu},
}
"""For each name, what it takes apart, in all its forms."""
