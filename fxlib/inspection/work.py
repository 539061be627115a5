"""Kinds of work: operators of one kind take time for the same reasons, and a device is described by kinds.

A kind is told by an operator's name, its tags (`torch.Tag`) and, of convolutions, its groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from fxlib.inspection.tensors import Size

WORK = (
    *("matmul", "attention", "convolution", "grouped_convolution", "pooling", "normalization", "reduction"),
    *("elementwise", "transcendental", "lookup", "other"),
)
"""All kinds; in a description "any" stands for those that are not listed."""

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.convolution, _aten._convolution, _aten.cudnn_convolution, _aten.convolution_overrideable}
_WINDOWS = {
    *(_aten.max_pool2d_with_indices, _aten.max_pool3d_with_indices),
    *(_aten.avg_pool2d, _aten.avg_pool3d),
}
_KINDS: dict[object, str] = {
    packet: kind
    for kind, packets in {
        "pooling": (
            *_WINDOWS,
            *(_aten._adaptive_avg_pool2d, _aten._adaptive_avg_pool3d),
            *(_aten.adaptive_max_pool2d, _aten.adaptive_max_pool3d),
        ),
        "normalization": (
            *(_aten.native_batch_norm, _aten._native_batch_norm_legit, _aten._native_batch_norm_legit_no_training),
            *(_aten.native_layer_norm, _aten.native_group_norm, _aten.cudnn_batch_norm, _aten._fused_rms_norm),
        ),
        "reduction": (_aten._softmax, _aten._log_softmax, _aten.var_mean, _aten.std_mean),
        "elementwise": (_aten.cat, _aten.copy_, _aten._to_copy, _aten.stack, _aten.constant_pad_nd, _aten.repeat),
        "transcendental": (
            *(_aten.sigmoid, _aten.sigmoid_, _aten.tanh, _aten.tanh_, _aten.gelu, _aten.gelu_, _aten.silu),
            *(_aten.silu_, _aten.exp, _aten.exp_, _aten.log, _aten.log_, _aten.log1p, _aten.expm1, _aten.softplus),
            *(_aten.elu, _aten.elu_, _aten.mish, _aten.mish_, _aten.erf, _aten.pow, _aten.sin, _aten.cos),
        ),
        "lookup": (
            *(_aten.embedding, _aten._embedding_bag, _aten._embedding_bag_forward_only, _aten.take),
            *(_aten.index, _aten.index_select, _aten.gather),
        ),
    }.items()
    for packet in packets
}
LOOKUPS = frozenset(packet for packet, kind in _KINDS.items() if kind == "lookup")
"""Operators that read as much of their first argument as they return, however large it is."""


def work_of(func: OpOverload[..., Any], args: tuple[Any, ...]) -> str:
    """Return the kind of an operator; of a convolution it depends on its groups."""
    if func.overloadpacket in _CONVOLUTIONS:
        return "grouped_convolution" if len(args) > 8 and args[8] > 1 else "convolution"
    return _kind(func)


def flops_of(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> Size:
    """Return the arithmetic of an operator, by torch's formulas; 0 where there is none for it."""
    formula = _formula(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=made)


def window_of(func: OpOverload[..., Any], args: tuple[Any, ...]) -> int:
    """Return how many values an operator looks at for each of its results, where that is a window that it is given."""
    if func.overloadpacket not in _WINDOWS:
        return 1
    sides, dimensions = args[1], 3 if "3d" in func.name() else 2
    return math.prod(sides) if len(sides) > 1 else int(sides[0]) ** dimensions


@functools.cache
def _kind(func: OpOverload[..., Any]) -> str:
    packet = func.overloadpacket
    if packet in _KINDS:
        return _KINDS[packet]
    if _formula(packet) is not None:
        return "attention" if "attention" in func.name() else "matmul"
    if torch.Tag.reduction in func.tags:
        return "reduction"
    return "elementwise" if torch.Tag.pointwise in func.tags else "other"


@functools.cache
def _formula(packet: object) -> Any:
    return _OWN.get(packet) or flop_registry.get(packet)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


_OWN: dict[object, Callable[..., Any]] = {_aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""Operators of which torch has the formula, but not under their name."""
