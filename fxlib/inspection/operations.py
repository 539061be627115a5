"""The operators that run inside a node, with the arithmetic of each and the bytes it moves.

A layer or function of torch consists of one or more ATen operators, which a device runs one after another. FLOPs follow
the formulas of `torch.utils.flop_counter` (two for a multiplication with an addition; only matrix products,
convolutions and attention count). Bytes are what an operator must read and write at least once; elements are the values
in them, which for pooling means the values in all of its windows.

Operators of one kind of work take time for the same reasons, so a device is described by kinds. The kind follows from
an operator's name, its tags (`torch.Tag`) and, for convolutions, its groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from typing_extensions import override

from fxlib.analysis.operators.in_place import is_view
from fxlib.inspection.tensor_facts import Size, bytes_of, count_of, distinct_tensors, memory_of
from fxlib.runtime import int8

_aten = torch.ops.aten
_FREE: frozenset[object] = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
"""Operators that neither read nor write memory."""

WORK = (
    *("matmul", "attention", "convolution", "grouped_convolution", "pooling", "normalization", "reduction"),
    *("elementwise", "transcendental", "lookup", "other"),
)
"""All kinds of work; in a description, "any" stands for the kinds that are not listed."""
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
_LOOKUPS = frozenset(packet for packet, kind in _KINDS.items() if kind == "lookup")
"""Operators that read only as much of their first argument as they return, however large it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator that a device runs."""

    name: str
    flops: Size
    read_bytes: Size
    written_bytes: Size
    elements: Size
    """Number of values that the operator processes one by one."""
    dtype: torch.dtype
    work: str
    """The kind of work, one of `WORK`."""
    is_view: bool = False
    """Whether the operator only makes a new tensor over the same memory, which is no work for the device."""

    @property
    def operator(self) -> str:
        """The operator's name without the overload, such as `aten.add`."""
        return self.name.rpartition(".")[0]


class Operations(TorchDispatchMode):
    """Records the operators that run under it; enter it inside the mode that makes fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operation] = []

    def taken(self) -> tuple[Operation, ...]:
        """Return the operators recorded since the last call."""
        found, self.found = tuple(self.found), []
        return found

    @override
    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions about a tensor, such as its device
            self.found.append(_operation(func, args, kwargs or {}, made))
        return made


def _operation(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> Operation:
    given, results = distinct_tensors((args, kwargs)), distinct_tensors(made)
    written = _written(func, args, kwargs)
    known = {memory_of(each) for each in given}
    fresh = [each for each in results if memory_of(each) not in known]
    shares = bool(given) and bool(results) and not fresh and not written
    free = shares or is_view(func) or func.overloadpacket in _FREE
    read = [] if free else list(_read(func, given, fresh))
    writes = [] if free else [*written, *fresh]
    window = _window_of(func, args)
    return Operation(
        name=str(func),
        flops=_flops_of(func, args, kwargs, made),
        read_bytes=sum(map(bytes_of, read)),
        written_bytes=sum(map(bytes_of, writes)),
        elements=count_of(results[0]) * window if window > 1 else sum(map(count_of, (*read, *writes))),
        dtype=next((each.dtype for each in (*results, *given)), torch.float32),
        work=_work_of(func, args),
        is_view=free,
    )


def _read(func: OpOverload[..., Any], given: list[torch.Tensor], fresh: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*fresh, *given[1:]] if func.overloadpacket in _LOOKUPS else given


def _written(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [
        tensor
        for position, name in _writes(func)
        for tensor in distinct_tensors(args[position] if position < len(args) else kwargs.get(name))
    ]


@functools.cache
def _writes(func: OpOverload[..., Any]) -> tuple[tuple[int, str], ...]:
    """Yield position and name of each argument that an operator writes, according to its schema."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


_CONVOLUTIONS = {_aten.convolution, _aten._convolution, _aten.cudnn_convolution, _aten.convolution_overrideable}


def _work_of(func: OpOverload[..., Any], args: tuple[Any, ...]) -> str:
    """Return the kind of an operator; for a convolution it depends on the groups."""
    if func.overloadpacket in _CONVOLUTIONS:
        return "grouped_convolution" if len(args) > 8 and args[8] > 1 else "convolution"
    return _kind(func)


def _flops_of(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> Size:
    """Return the arithmetic of an operator by torch's formulas; 0 if torch has none for it."""
    formula = _formula(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=made)


def _window_of(func: OpOverload[..., Any], args: tuple[Any, ...]) -> int:
    """Return how many values an operator reads for each result, if it has a window argument."""
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


def _int8_layer(_x: Any, _scale: Any, _zero: Any, weight: torch.Tensor, *_: Any, out_val: torch.Tensor) -> int:
    return 2 * out_val.numel() * math.prod(weight.shape[1:])


def _products(rows: torch.Tensor, *weights: torch.Tensor) -> int:
    """Return the arithmetic of a product of each row with each of some matrices."""
    return 2 * math.prod(rows.shape[:-1]) * sum(math.prod(each.shape) for each in weights)


def _recurrent_layer(x: torch.Tensor, of_inputs: torch.Tensor, of_hidden: torch.Tensor, *_: Any, **__: Any) -> int:
    return _products(x, of_inputs, of_hidden)


def _attention_layer(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int, *_: Any, **__: Any
) -> int:
    """Return the arithmetic of four projections and of attention, on which the number of heads has no influence."""
    shapes = ((each.shape[0], 1, *each.shape[1:]) for each in (query, key, value))
    rows = sum(math.prod(each.shape[:-1]) for each in (query, key, value, query))
    return sdpa_flop_count(*shapes) + 2 * rows * width**2


def _encoder_layer(x: torch.Tensor, width: int, *others: Any, **_: Any) -> int:
    return _attention_layer(x, x, x, width) + _products(x, others[12], others[14])  # by the two linear layers' weights


_OWN: dict[object, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten.mkldnn_rnn_layer: _recurrent_layer,
    _aten._native_multi_head_attention: _attention_layer,
    _aten._transformer_encoder_layer_fwd: _encoder_layer,
    **{getattr(torch.ops.fxlib, name): _int8_layer for name in int8.LAYERS},
}
"""Operators for which torch has no formula, or has it under another name."""
