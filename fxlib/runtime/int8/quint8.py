"""Torch's own quantized tensors, which know their scale and zero point, in the memory of plain integers.

Torch's operators on them take packed weights as one object, with less to do for each call than those on integers.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final, Literal

import torch

Engine = Literal["fbgemm", "onednn"]
"""A library that computes with packed weights."""

LINEAR: Final = (torch.ops.quantized.linear.default, torch.ops.quantized.linear_relu.default)
LINEAR_TO_FLOAT: Final = (
    torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default,
    torch.ops.quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32.default,
)
CONVOLUTION: Final = (torch.ops.quantized.conv2d.new, torch.ops.quantized.conv2d_relu.new)
"""The layers, each without and with a ReLU."""
_NORM: Final = torch.ops.quantized.batch_norm2d.default
_ENGINE_SWITCH: Final = threading.Lock()
_PLAIN_TYPES: Final = (torch.Tensor, torch.nn.Parameter)


def is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but numbers in the processor's memory, so that its storage may be read.

    Others have no storage, or more keys in torch's dispatcher, such as for negated numbers or those that are all zero.
    """
    return type(x) in _PLAIN_TYPES and torch._C._dispatch_keys(x).raw_repr() in _plain_keys()


@functools.cache
def _plain_keys() -> frozenset[int]:
    with torch.utils._python_dispatch._disable_current_modes():
        counted = torch.empty(0, device="cpu")
        with torch.inference_mode():
            uncounted = torch.empty(0, device="cpu")
    return frozenset(torch._C._dispatch_keys(each).raw_repr() for each in (counted, uncounted))


def quantized(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return the quint8 tensor of float32 numbers; one halfway between two levels becomes either of them."""
    _silence()
    return torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)


def as_levels(integers: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return the quint8 tensor of uint8 integers as they lie in memory."""
    _silence()
    empty = torch._empty_affine_quantized((0,), scale=scale, zero_point=zero_point, dtype=torch.quint8)
    return empty.set_(integers.untyped_storage(), integers.storage_offset(), integers.shape, integers.stride())


def as_integers(levels: torch.Tensor) -> torch.Tensor:
    """Return the integers of a quint8 tensor as they lie in memory; `int_repr` copies them, in three times the time."""
    integers = torch.empty(0, dtype=torch.uint8)
    return integers.set_(levels.untyped_storage(), levels.storage_offset(), levels.shape, levels.stride())


def packed(pack: Callable[..., Any], engine: Engine, weight: torch.Tensor, scales: torch.Tensor, *others: Any) -> Any:
    """Return int8 weights, with a scale for each output, in the order of an engine: `pack(weights, *others)`.

    Torch packs for the engine that is set for the whole process. It is set for no longer than this takes.
    """
    _silence()
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    levels = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
    with _ENGINE_SWITCH:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = engine
        try:
            return pack(levels, *others)
        finally:
            torch.backends.quantized.engine = before


def norm(
    levels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out_scale: float, out_zero_point: int
) -> torch.Tensor:
    """Return `levels * weight + bias` of images, channels last, with a weight and a bias for each channel.

    The operator of oneDNN on plain integers takes ten times as long, for the same bits.
    """
    return _NORM(levels, weight, bias, *_unmoved(len(bias)), 0.0, out_scale, out_zero_point)


@functools.lru_cache(maxsize=256)
def _unmoved(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the variance with which a norm only applies its weight and its bias."""
    with torch.inference_mode(mode=False):
        return torch.zeros(channels, dtype=torch.float32), torch.ones(channels, dtype=torch.float32)


def computes_here() -> bool:
    """Return whether both engines compute on this processor, and the user has chosen none of the others."""
    engines = torch.backends.quantized
    return engines.engine in ("x86", "fbgemm") and {"fbgemm", "onednn"}.issubset(engines.supported_engines)


@functools.cache
def _silence() -> None:
    """Let torch give its only warning that a later version drops the dtype; the versions admitted here have it.

    It is not done at import, since the first operator decides which of the processor's instructions torch uses.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.quantize_per_tensor(torch.zeros(1, dtype=torch.float32), 1.0, 0, torch.quint8)
