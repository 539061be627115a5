"""Operators on int8 weights: a linear layer, a convolution, and the operators that work on integers between them.

They are operators of torch's own dispatcher (`torch.ops.fxlib`), so that graphs, analyses and fake tensors
treat them as any other. oneDNN computes them. It wants weights in an order of its own, which depends on the processor:
weights travel as plain integers, and are packed where a module first runs.

A quantized number q stands for `scale * (q - zero_point)`. Inputs are unsigned (0 to 255); weights are signed, with one
scale for each output channel, and within `WEIGHT_LIMIT`: processors without VNNI add up pairs of products in 16 bits,
which larger weights would overflow. Within the limit, sums of integers are exact, and the same on every processor.

B. Jacob and others, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
CVPR 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._prims_common import suggest_memory_format

from fxlib.runtime.int8 import quint8
from fxlib.runtime.int8.layers import (
    REACH,
    Call,
    Layer,
    Result,
    Window,
    check,
    check_devices,
    check_levels,
    check_uint8,
    check_without_gradient,
    fbgemm_rows,
)  # fmt: skip
from fxlib.runtime.int8.quint8 import as_integers, as_levels, quantized

NAMESPACE: Final = "fxlib"
"""The namespace of the operators, `torch.ops.fxlib.quantize` and others; only `int8_conv2d_add_over` writes to an
argument."""
LAYERS: Final = ("int8_linear", "int8_conv2d", "int8_conv2d_add", "int8_conv2d_add_over")
"""The names of the operators that multiply by int8 weights."""
MANY_ROWS: Final = torch.ops.onednn.qlinear_pointwise.default
"""The linear layer of oneDNN."""
_QCONV: Final = torch.ops.onednn.qconv_pointwise.default
_QCONV_ADD: Final = torch.ops.onednn.qconv2d_pointwise.binary
_LARGEST_WINDOW: Final = 1 << 20
"""The largest number of levels that are averaged: torch adds them up in 32 bits."""
_MIDDLE: Final = 128
"""The zero point of inputs that are quantized by the range of their values."""
_UNPADDED: Final = [0, 0]
_LAYER: Final = "Tensor x, float? scale, int zero_point, Tensor weight, Tensor weight_scales, Tensor? bias"
_WINDOW: Final = "int[2] stride, int[2] padding, int[2] dilation, int groups"
_SCALED: Final = "Tensor x, float scale, int zero_point"
_SCALE_OUT: Final = "float out_scale, int out_zero_point"
_RESULT: Final = "float? out_scale, int out_zero_point, str activation"
_POOLED: Final = "int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode"
_OTHER: Final = f"other, float other_scale, int other_zero_point, {_SCALE_OUT}, bool relu"


def is_operator(target: object) -> bool:
    """Return whether a graph's function is one of these operators, with or without the name of its overload."""
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    return isinstance(packet, torch._ops.OpOverloadPacket) and packet._qualified_op_name.startswith(f"{NAMESPACE}::")


def quantize(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return the levels of a float32 tensor. NaN becomes any level; infinities become the first or the last one.

    A number halfway between two levels becomes either of them.
    """
    check_without_gradient(x)
    check(x.dtype is torch.float32, "what is quantized is float32")
    check_levels(scale, zero_point)
    if not x.numel():
        return _fake_quantize(x)
    return as_integers(quantized(x, scale, zero_point))


def dequantize(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return the float32 numbers for which levels stand."""
    check_uint8(x)
    check_levels(scale, zero_point)
    found = x.to(torch.float32)
    return (found.sub_(zero_point) if zero_point else found).mul_(scale)


def linear(x: torch.Tensor, scale: float | None, zero_point: int, *layer_and_result: Any) -> torch.Tensor:
    """Return `x @ weight.T + bias`; x is uint8 if it has a scale, else float32; see `Layer` and `Result`."""
    call = Call(x, (scale, zero_point), layer_and_result[:3], layer_and_result[3:])
    if (known := call.known) is not None and x.is_contiguous():
        found = known[0](x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), *known[1:])
        return found if x.dim() == 2 else found.reshape(*x.shape[:-1], -1)
    layer, result = Layer(*layer_and_result[:3]), Result(*layer_and_result[3:])
    weight = layer.weight
    layer.check(x, dimensions=2)
    check(x.dim() >= 1 and x.shape[-1] == weight.shape[1], "the input's last dimension is not the weight's")
    shape = (*x.shape[:-1], weight.shape[0])
    levels = _Levels.of(x, scale, zero_point) if x.numel() else None
    if levels is None:
        return result.without_values(shape, torch.contiguous_format)
    result.options("linear")
    rows = levels.values.reshape(-1, x.shape[-1])
    given: tuple[Any, ...]
    few = len(rows) <= fbgemm_rows() and result.relu is not None and quint8.computes_here()
    if few and 1e-30 < levels.scale < 1e30:
        given = (few_rows, levels.scale, levels.zero_point, layer.for_linear(), result)
    else:
        given = (MANY_ROWS, levels.scale, levels.zero_point, *many_rows(layer, result))
    call.keep(given)
    return given[0](rows, *given[1:]).reshape(shape)


def many_rows(layer: Layer, result: Result) -> tuple[Any, ...]:
    """Return what `MANY_ROWS` is given besides an input and its point."""
    packed = layer.packed((), lambda: torch.ops.onednn.qlinear_prepack(layer.weight, None))
    return packed, *layer.scales_and_bias, *result.options("linear")


def few_rows(x: torch.Tensor, scale: float, zero_point: int, packed: Any, result: Result) -> torch.Tensor:
    """Return a linear layer of few inputs by FBGEMM: without VNNI, oneDNN takes up to twelve times as long for one."""
    if result.scale is None:  # levels become numbers and levels again, without loss but for extreme scales
        return quint8.LINEAR_TO_FLOAT[bool(result.relu)](dequantize(x, scale, zero_point), scale, zero_point, packed)
    levels = torch._make_per_tensor_quantized_tensor(x, scale, zero_point)
    return as_integers(quint8.LINEAR[bool(result.relu)](levels, packed, result.scale, result.zero_point))


def _on_levels(x: torch.Tensor, scale: float, zero_point: int, packed: Any, result: Result) -> torch.Tensor:
    """Return a convolution by torch's own operator, as the program on quantized tensors computes it."""
    levels = as_levels(x, scale, zero_point)
    return as_integers(quint8.CONVOLUTION[bool(result.relu)](levels, packed, result.scale, result.zero_point))


def conv2d(x: torch.Tensor, scale: float | None, zero_point: int, *others: Any) -> torch.Tensor:
    """Return a convolution of one image or a batch of images, channels last; the arguments are as for `linear`."""
    if x.dim() == 3:
        return conv2d(x[None], scale, zero_point, *others)[0]
    call = Call(x, (scale, zero_point), others[:3], others[3:])
    if (known := call.known) is not None:
        return known[0](x, *known[1:])
    layer, window, result = Layer(*others[:3]), Window(*others[3:7]), Result(*others[7:])
    layer.check(x, dimensions=4)
    shape = window.shape_of_result(x, layer.weight)
    check(x.numel() > 0 or len(x) == 0, "images are not empty")
    if x.numel() and window.lies_in_padding(x, layer.weight):
        return conv2d(window.padded(x, zero_point), scale, zero_point, *others[:4], _UNPADDED, *others[5:])
    levels = _Levels.of(x, scale, zero_point) if x.numel() else None
    if levels is None:
        return result.without_values(shape, torch.channels_last)
    options = result.options("convolution")
    given: tuple[Any, ...]
    if result.scale is not None and result.relu is not None and quint8.computes_here():
        given = (_on_levels, levels.scale, levels.zero_point, layer.for_convolution(window), result)
    else:
        point = levels.scale, levels.zero_point
        packed = _packed(levels.values.shape, point, layer, window)
        given = (_QCONV, *point, packed, *layer.scales_and_bias, *window.options, *options)
    call.keep(given)
    return given[0](levels.values, *given[1:])


def conv2d_add(*args: Any) -> torch.Tensor:
    """Return the levels of the sum of a convolution and other levels, rounded once; arguments are as for `conv2d`."""
    position = len(args) - 6
    # oneDNN adds in place.
    return conv2d_add_over(
        *args[:position], args[position].clone(memory_format=torch.preserve_format), *args[position + 1 :]
    )


def conv2d_add_over(x: torch.Tensor, scale: float, zero_point: int, *others: Any) -> torch.Tensor:
    """Return the result of `conv2d_add`; afterwards, the added levels may hold anything."""
    other, other_scale, other_zero_point, out_scale, out_zero_point, _ = others[7:]
    if x.dim() == 3:
        return conv2d_add_over(x[None], scale, zero_point, *others[:7], other[None], *others[8:])[0]
    call = Call(x, (scale, zero_point), others[:3], (*others[3:7], other.shape, other.dtype, other.device, *others[8:]))
    if (known := call.known) is not None:
        return known[0](x, other)
    layer, window = Layer(*others[:3]), Window(*others[3:7])
    layer.check(x, dimensions=4)
    shape = window.shape_of_result(x, layer.weight)
    check_uint8(x, other)
    check(list(other.shape) == shape, "what is added has the shape of the convolution's result")
    check_levels(other_scale, other_zero_point)
    check_levels(out_scale, out_zero_point)
    check(x.numel() > 0 or len(x) == 0, "images are not empty")
    if not x.numel():
        return other.clone(memory_format=torch.channels_last)
    check(scale is not None, "an input of unknown scale is float32")
    check_levels(scale, zero_point)
    if window.lies_in_padding(x, layer.weight):
        return conv2d_add_over(window.padded(x, zero_point), scale, zero_point, *others[:4], _UNPADDED, *others[5:])
    add = adding(x.shape, (scale, zero_point), layer, window, others[8:])
    call.keep((add,))
    return add(x, other)


def adding(
    shape: Sequence[int], point: tuple[float, int], layer: Layer, window: Window, others: Sequence[Any]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function of an input and of the levels to add, over which it writes; it checks nothing.

    Args:
        shape: the shape of inputs for which weights are packed; others are computed, too.
        point: the scale and the zero point of inputs.
        layer: the weights.
        window: the options of the convolution.
        others: the last arguments of `conv2d_add`, those after the levels to add.
    """
    other_scale, other_zero_point, out_scale, out_zero_point, relu = others
    scales, zeros, bias = layer.scales_and_bias
    before = (*point, _packed(shape, point, layer, window), scales, zeros)
    points = (out_scale, out_zero_point, torch.uint8, other_scale, other_zero_point)
    after: tuple[Any, ...] = (bias, *window.options, *points, "sum", 1.0, "relu" if relu else "none", [], "")

    def add(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _QCONV_ADD(x, *before, other.contiguous(memory_format=torch.channels_last), *after)

    return add


def _packed(shape: Sequence[int], point: tuple[float, int], layer: Layer, window: Window) -> Any:
    """Return the weights of a convolution as oneDNN takes them."""

    def pack() -> Any:
        return torch.ops.onednn.qconv_prepack(layer.weight, layer.scales, *point, *window.options, list(shape))

    return layer.packed((point[1], *map(tuple, window.options[:3]), window.groups), pack)


def max_pool2d(x: torch.Tensor, *options: Any) -> torch.Tensor:
    """Return the largest level in each window, which stands for the largest number; borders do not count."""
    if x.dim() == 3:
        return max_pool2d(x[None], *options)[0]
    found = _fake_max_pool2d(x, *options)
    if not found.numel():
        return found
    sizes = [list(each) for each in options[:4]]
    return _ordered(torch.ops.quantized.max_pool2d.default(x, *sizes, options[4]), found)


def avg_pool2d(x: torch.Tensor, *options: Any) -> torch.Tensor:
    """Return the mean level of each window, rounded, which stands for the mean of the numbers."""
    if x.dim() == 3:
        return avg_pool2d(x[None], *options)[0]
    found = _fake_avg_pool2d(x, *options)
    return _ordered(averaged(x, *map(list, options)), found) if found.numel() else found


def averaged(x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return the same for images; it checks nothing. A mean halfway between two levels becomes the even one."""
    return as_integers(torch.ops.aten.avg_pool2d.default(as_levels(x, 1.0, 0), kernel, stride))


def norm(x: torch.Tensor, scale: float, zero_point: int, *others: Any) -> torch.Tensor:
    """Return the levels of `x * weight + bias`, with a weight and a bias for each channel, the second dimension.

    If zero is the first level, negative numbers become zero, as by a ReLU.
    """
    weight, bias, out_scale, out_zero_point = others
    found = _fake_norm(x, scale, zero_point, weight, bias)
    check_levels(scale, zero_point)
    check_levels(out_scale, out_zero_point)
    if not x.numel():
        return found
    levels = quint8.norm(as_levels(x, scale, zero_point), weight, bias, out_scale, out_zero_point)
    return _ordered(as_integers(levels), found)


def _ordered(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return images in the memory order of `like`, which may be overwritten."""
    return value if value.stride() == like.stride() else like.copy_(value)


def _fake_quantize(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device, memory_format=suggest_memory_format(x))


def _fake_linear(x: torch.Tensor, _scale: Any, _zero_point: Any, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    check_devices(x, weight, *others[:2])
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=Result(*others[2:]).dtype)


def _fake_conv2d(x: torch.Tensor, _scale: Any, _zero_point: Any, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    if x.dim() == 3:
        return _fake_conv2d(x[None], _scale, _zero_point, weight, *others)[0]
    check_devices(x, weight, *others[:2])
    shape, dtype = Window(*others[2:6]).shape_of_result(x, weight), Result(*others[6:]).dtype
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)


def _fake_conv2d_add(x: torch.Tensor, scale: Any, zero_point: Any, *others: Any) -> torch.Tensor:
    check_devices(x, others[7])
    return _fake_conv2d(x, scale, zero_point, *others[:7], 1.0, 0, "none")


def _fake_max_pool2d(x: torch.Tensor, *options: Any) -> torch.Tensor:
    if x.dim() == 3:
        return _fake_max_pool2d(x[None], *options)[0]
    kernel, stride, padding, dilation, ceil_mode = options
    check_uint8(x)
    check(x.dim() == 4, "a pooling takes 3 dimensions, or a batch of 4")
    check(len(kernel) == len(stride) == len(padding) == len(dilation) == 2, "a pooling's options are two numbers each")
    check(min(*kernel, *stride, *dilation) >= 1 and min(padding) >= 0, "kernel, stride and dilation are positive")
    check(max(*kernel, *stride, *dilation) < REACH, f"kernel, stride and dilation are less than {REACH:,}")
    sizes = list[Any]()
    for size, over, step, more, spacing in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True):
        check(2 * more <= over, "the padding is at most half of the kernel")
        free = size + 2 * more - spacing * (over - 1) - 1
        check(free >= 0, "the kernel is larger than its input")
        count = (free + (step - 1 if ceil_mode else 0)) // step + 1
        sizes.append(count - (1 if ceil_mode and (count - 1) * step >= size + more else 0))
    shape = (*x.shape[:2], *sizes)
    return torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=suggest_memory_format(x))


def _fake_avg_pool2d(x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    found = _fake_max_pool2d(x, kernel, stride, (0, 0), (1, 1), False)
    check(math.prod(kernel) <= _LARGEST_WINDOW, f"a window of a mean has at most {_LARGEST_WINDOW:,} levels")
    return found


def _fake_norm(x: torch.Tensor, _scale: Any, _zero: Any, *weights: Any) -> torch.Tensor:
    weight, bias = weights[:2]
    check_uint8(x)
    check(x.dim() == 4, "a norm takes a batch of images")
    for each in (weight, bias):
        fits = each.dtype is torch.float32 and each.shape == x.shape[1:2] and each.is_contiguous()
        check(fits, "a norm's weight and bias have a float32 for each channel")
    check_devices(x, weight, bias)
    check_without_gradient(weight, bias)
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device, memory_format=suggest_memory_format(x))


def _fake_dequantize(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class _Levels:
    """An input as levels, which are integers."""

    values: torch.Tensor
    scale: float
    zero_point: int

    @classmethod
    def of(cls, x: torch.Tensor, scale: float | None, zero_point: int) -> _Levels | None:
        """Return an input as it is or, without a scale, quantized by the range of its values; None without a range."""
        if scale is not None:
            check(x.dtype is torch.uint8, "an input of known scale is uint8")
            check_levels(scale, zero_point)
            return cls(x, scale, zero_point)
        check(x.dtype is torch.float32, "an input of unknown scale is float32")
        # aminmax copies a tensor that is not contiguous.
        least, most = torch.aminmax(x if x.is_contiguous() or x.dim() != 4 else x.permute(0, 2, 3, 1))
        found = max(-float(least), float(most)) / (_MIDDLE - 1)
        if not math.isfinite(found):
            return None
        scale = found if found > 0.0 and math.isfinite(1.0 / found) else 1.0
        return cls(quantize(x, scale, _MIDDLE), scale, _MIDDLE)


_LIBRARY: Final = torch.library.Library(NAMESPACE, "DEF")
for _schema, _computes, _pretends in (
    ("quantize(Tensor x, float scale, int zero_point) -> Tensor", quantize, _fake_quantize),
    (f"int8_linear({_LAYER}, {_RESULT}) -> Tensor", linear, _fake_linear),
    (f"int8_conv2d({_LAYER}, {_WINDOW}, {_RESULT}) -> Tensor", conv2d, _fake_conv2d),
    (f"int8_conv2d_add({_LAYER}, {_WINDOW}, Tensor {_OTHER}) -> Tensor", conv2d_add, _fake_conv2d_add),
    (f"int8_conv2d_add_over({_LAYER}, {_WINDOW}, Tensor(a!) {_OTHER}) -> Tensor", conv2d_add_over, _fake_conv2d_add),
    (f"int8_max_pool2d(Tensor x, {_POOLED}) -> Tensor", max_pool2d, _fake_max_pool2d),
    ("int8_avg_pool2d(Tensor x, int[2] kernel, int[2] stride) -> Tensor", avg_pool2d, _fake_avg_pool2d),
    (f"int8_norm({_SCALED}, Tensor weight, Tensor bias, {_SCALE_OUT}) -> Tensor", norm, _fake_norm),
    (f"dequantize({_SCALED}) -> Tensor", dequantize, _fake_dequantize),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _computes, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{_schema.partition('(')[0]}", _pretends, lib=_LIBRARY)
