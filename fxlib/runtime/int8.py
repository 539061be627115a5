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

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._prims_common import suggest_memory_format

from fxlib.errors import FxlibError

NAMESPACE: Final = "fxlib"
"""The namespace of the operators, `torch.ops.fxlib.quantize` and others; only `int8_conv2d_add_over` writes to an
argument."""
LAYERS: Final = ("int8_linear", "int8_conv2d", "int8_conv2d_add", "int8_conv2d_add_over")
"""The names of the operators that multiply by int8 weights."""
WEIGHT_LIMIT: Final = 64
"""The largest magnitude of an int8 weight: 2 * 255 * 64 is within 16 bits with a sign, and 2 * 255 * 127 is not."""
LARGEST: Final = 255
"""The largest level of an input."""

_POST_OPS: Final[Mapping[str, tuple[str, list[float], str]]] = {
    "none": ("none", [], ""),
    "relu": ("relu", [], ""),
    "relu6": ("hardtanh", [0.0, 6.0], ""),
    "hardswish": ("hardswish", [], ""),
    "silu": ("swish", [], ""),
    "tanh": ("tanh", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
}
"""oneDNN's name of each activation, with its arguments and its variant."""
ACTIVATIONS: Final[Mapping[str, frozenset[str]]] = {
    "linear": frozenset(_POST_OPS),
    "convolution": frozenset({"none", "relu", "relu6", "hardswish", "silu"}),
}
"""The activations that each kind of layer applies to its sums, in float, before they are rounded."""
_QLINEAR: Final = torch.ops.onednn.qlinear_pointwise.default
_QCONV: Final = torch.ops.onednn.qconv_pointwise.default
_QCONV_ADD: Final = torch.ops.onednn.qconv2d_pointwise.binary
_FBGEMM: Final = (torch.ops.quantized.linear.default, torch.ops.quantized.linear_relu.default)
_FBGEMM_TO_FLOAT: Final = (
    torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default,
    torch.ops.quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32.default,
)
"""The linear layers of FBGEMM, without and with a ReLU."""
_FEW_ROWS: Final = 96
"""The number of a linear layer's inputs up to which FBGEMM is faster than oneDNN, measured on a processor with AVX2."""
_MIDDLE: Final = 128
"""The zero point of inputs that are quantized by the range of their values."""
_REACH: Final = 1 << 20
"""Bound of a window's stride, padding and dilation: oneDNN counts in 32 bits, and adds up padded zero points."""
_FORMS: Final = 16
"""The number of forms in which a weight is kept packed; without a limit, computed windows could make it grow."""
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


def _quantize(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return the levels of a float32 tensor. NaN becomes any level; infinities become the first or the last one.

    A number halfway between two levels becomes either of them.
    """
    _check_without_gradient(x)
    _check(x.dtype is torch.float32, "what is quantized is float32")
    _check_levels(scale, zero_point)
    if not x.numel():
        return _fake_quantize(x)
    _silence_quint8()
    found = torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)
    return _as_integers(found)


def _as_integers(levels: torch.Tensor) -> torch.Tensor:
    """Return the integers of a quint8 tensor as they lie in memory; `int_repr` copies them, in three times the time."""
    return torch.empty(0, dtype=torch.uint8).set_(levels.untyped_storage(), 0, levels.shape, levels.stride())


def _dequantize(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Return the float32 numbers for which levels stand."""
    _check_uint8(x)
    _check_levels(scale, zero_point)
    found = x.to(torch.float32)
    return (found.sub_(zero_point) if zero_point else found).mul_(scale)


def _linear(x: torch.Tensor, scale: float | None, zero_point: int, *layer_and_result: Any) -> torch.Tensor:
    """Return `x @ weight.T + bias`; x is uint8 if it has a scale, else float32; see `_Layer` and `_Result`."""
    call = _Call(x, (scale, zero_point), layer_and_result[:3], layer_and_result[3:])
    if (known := call.known) is not None and x.dim() == 2 and x.is_contiguous():
        return known[0](x, *known[1:])
    layer, result = _Layer(*layer_and_result[:3]), _Result(*layer_and_result[3:])
    weight = layer.weight
    layer.check(x, dimensions=2)
    _check(x.dim() >= 1 and x.shape[-1] == weight.shape[1], "the input's last dimension is not the weight's")
    shape = (*x.shape[:-1], weight.shape[0])
    levels = _Levels.of(x, scale, zero_point) if x.numel() else None
    if levels is None:
        return result.without_values(shape, torch.contiguous_format)
    options = result.options("linear")
    rows = levels.values.reshape(-1, x.shape[-1])
    given: tuple[Any, ...]
    if len(rows) <= _FEW_ROWS and _suits_fbgemm(levels, result):
        given = (_few_rows, levels.scale, levels.zero_point, layer.packed_for_few_rows(), result)
    else:
        packed = layer.packed((), lambda: torch.ops.onednn.qlinear_prepack(weight, None))
        given = (_QLINEAR, levels.scale, levels.zero_point, packed, *layer.scales_and_bias, *options)
    call.keep(given)
    return given[0](rows, *given[1:]).reshape(shape)


def _suits_fbgemm(levels: _Levels, result: _Result) -> bool:
    """Return whether FBGEMM has this activation, keeps these levels, and is what torch uses on this processor."""
    return (
        torch.backends.quantized.engine in ("x86", "fbgemm")
        and result.activation in ("none", "relu")
        and 1e-30 < levels.scale < 1e30  # levels become numbers and levels again, without loss
    )


def _few_rows(x: torch.Tensor, scale: float, zero_point: int, packed: Any, result: _Result) -> torch.Tensor:
    """Return a linear layer of few inputs by FBGEMM: for one, oneDNN takes up to twelve times as long."""
    relu = result.activation == "relu"
    if result.scale is None:
        return _FBGEMM_TO_FLOAT[relu](_dequantize(x, scale, zero_point), scale, zero_point, packed)
    levels = torch._make_per_tensor_quantized_tensor(x, scale, zero_point)
    return _as_integers(_FBGEMM[relu](levels, packed, result.scale, result.zero_point))


def _conv2d(x: torch.Tensor, scale: float | None, zero_point: int, *others: Any) -> torch.Tensor:
    """Return a convolution of one image or a batch of images, channels last; the arguments are as for `_linear`."""
    if x.dim() == 3:
        return _conv2d(x[None], scale, zero_point, *others)[0]
    call = _Call(x, (scale, zero_point), others[:3], others[3:])
    if (known := call.known) is not None:
        return _QCONV(x, *known)
    layer, window, result = _Layer(*others[:3]), _Window(*others[3:7]), _Result(*others[7:])
    layer.check(x, dimensions=4)
    shape = window.shape_of_result(x, layer.weight)
    _check(x.numel() > 0 or len(x) == 0, "images are not empty")
    levels = _Levels.of(x, scale, zero_point) if x.numel() else None
    if levels is None:
        return result.without_values(shape, torch.channels_last)
    given = (*_given(levels, layer, window), *layer.scales_and_bias, *window.options, *result.options("convolution"))
    call.keep(given)
    return _QCONV(levels.values, *given)


def _conv2d_add(*args: Any) -> torch.Tensor:
    """Return the levels of the sum of a convolution and other levels, rounded once; arguments are as for `_conv2d`."""
    position = len(args) - 6
    # oneDNN adds in place.
    return _conv2d_add_over(
        *args[:position], args[position].clone(memory_format=torch.preserve_format), *args[position + 1 :]
    )


def _conv2d_add_over(x: torch.Tensor, scale: float, zero_point: int, *others: Any) -> torch.Tensor:
    """Return the result of `_conv2d_add`; afterwards, the added levels may hold anything."""
    other, other_scale, other_zero_point, out_scale, out_zero_point, relu = others[7:]
    if x.dim() == 3:
        return _conv2d_add_over(x[None], scale, zero_point, *others[:7], other[None], *others[8:])[0]
    call = _Call(
        x, (scale, zero_point), others[:3], (*others[3:7], other.shape, other.dtype, other.device, *others[8:])
    )
    if (known := call.known) is not None:
        return _QCONV_ADD(x, *known[:5], other.contiguous(memory_format=torch.channels_last), *known[5:])
    layer, window = _Layer(*others[:3]), _Window(*others[3:7])
    layer.check(x, dimensions=4)
    shape = window.shape_of_result(x, layer.weight)
    _check_uint8(x, other)
    _check(list(other.shape) == shape, "what is added has the shape of the convolution's result")
    _check_levels(other_scale, other_zero_point)
    _check_levels(out_scale, out_zero_point)
    _check(x.numel() > 0 or len(x) == 0, "images are not empty")
    levels = _Levels.of(x, scale, zero_point) if x.numel() else None
    total = other.contiguous(memory_format=torch.channels_last)
    if levels is None:
        return total.clone()
    scales, zeros, bias = layer.scales_and_bias
    point = (out_scale, out_zero_point, torch.uint8, other_scale, other_zero_point)
    after: tuple[Any, ...] = ("sum", 1.0, "relu" if relu else "none", [], "")
    given = (*_given(levels, layer, window), scales, zeros, bias, *window.options, *point, *after)
    call.keep(given)
    return _QCONV_ADD(levels.values, *given[:5], total, *given[5:])


def _given(levels: _Levels, layer: _Layer, window: _Window) -> tuple[Any, ...]:
    """Return the scale and the zero point of an input, and the weights packed for it."""
    point = (levels.scale, levels.zero_point)

    def pack() -> Any:
        of = (layer.weight, layer.scales, *point, *window.options, list(levels.values.shape))
        return torch.ops.onednn.qconv_prepack(*of)

    form = (levels.zero_point, *map(tuple, window.options[:3]), window.groups)
    return *point, layer.packed(form, pack)


def _max_pool2d(x: torch.Tensor, *options: Any) -> torch.Tensor:
    """Return the largest level in each window, which stands for the largest number; borders do not count."""
    if x.dim() == 3:
        return _max_pool2d(x[None], *options)[0]
    found = _fake_max_pool2d(x, *options)
    if not found.numel():
        return found
    sizes = [list(each) for each in options[:4]]
    return _ordered(torch.ops.quantized.max_pool2d(x, *sizes, options[4]), found)


def _norm(x: torch.Tensor, scale: float, zero_point: int, *others: Any) -> torch.Tensor:
    """Return the levels of `x * weight + bias`, with a weight and a bias for each channel, the second dimension.

    If zero is the first level, negative numbers become zero, as by a ReLU.
    """
    weight, bias, out_scale, out_zero_point = others
    found = _fake_norm(x, scale, zero_point, weight, bias)
    _check_levels(scale, zero_point)
    _check_levels(out_scale, out_zero_point)
    if not x.numel():
        return found
    options = (weight, bias, *_unmoved(len(bias)), 0.0, out_scale, out_zero_point, torch.uint8)
    return _ordered(torch.ops.onednn.qbatch_norm2d(x, scale, zero_point, *options), found)


@functools.lru_cache(maxsize=256)
def _unmoved(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the variance with which a norm only applies its weight and its bias."""
    with torch.inference_mode(mode=False):
        return torch.zeros(channels), torch.ones(channels)


def _ordered(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return images in the memory order of `like`, which may be overwritten."""
    return value if value.stride() == like.stride() else like.copy_(value)


def _fake_quantize(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device, memory_format=suggest_memory_format(x))


def _fake_linear(x: torch.Tensor, _scale: Any, _zero_point: Any, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    _check_devices(x, weight, *others[:2])
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=_Result(*others[2:]).dtype)


def _fake_conv2d(x: torch.Tensor, _scale: Any, _zero_point: Any, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    if x.dim() == 3:
        return _fake_conv2d(x[None], _scale, _zero_point, weight, *others)[0]
    _check_devices(x, weight, *others[:2])
    shape, dtype = _Window(*others[2:6]).shape_of_result(x, weight), _Result(*others[6:]).dtype
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)


def _fake_conv2d_add(x: torch.Tensor, scale: Any, zero_point: Any, *others: Any) -> torch.Tensor:
    _check_devices(x, others[7])
    return _fake_conv2d(x, scale, zero_point, *others[:7], 1.0, 0, "none")


def _fake_max_pool2d(x: torch.Tensor, *options: Any) -> torch.Tensor:
    if x.dim() == 3:
        return _fake_max_pool2d(x[None], *options)[0]
    kernel, stride, padding, dilation, ceil_mode = options
    _check_uint8(x)
    _check(x.dim() == 4, "a pooling takes 3 dimensions, or a batch of 4")
    _check(len(kernel) == len(stride) == len(padding) == len(dilation) == 2, "a pooling's options are two numbers each")
    _check(min(*kernel, *stride, *dilation) >= 1 and min(padding) >= 0, "kernel, stride and dilation are positive")
    _check(max(*kernel, *stride, *dilation) < _REACH, f"kernel, stride and dilation are less than {_REACH:,}")
    sizes = list[Any]()
    for size, over, step, more, spacing in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True):
        _check(2 * more <= over, "the padding is at most half of the kernel")
        free = size + 2 * more - spacing * (over - 1) - 1
        _check(free >= 0, "the kernel is larger than its input")
        count = (free + (step - 1 if ceil_mode else 0)) // step + 1
        sizes.append(count - (1 if ceil_mode and (count - 1) * step >= size + more else 0))
    shape = (*x.shape[:2], *sizes)
    return torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=suggest_memory_format(x))


def _fake_norm(x: torch.Tensor, _scale: Any, _zero: Any, *weights: Any) -> torch.Tensor:
    weight, bias = weights[:2]
    _check_uint8(x)
    _check(x.dim() == 4, "a norm takes a batch of images")
    for each in (weight, bias):
        fits = each.dtype is torch.float32 and each.shape == x.shape[1:2] and each.is_contiguous()
        _check(fits, "a norm's weight and bias have a float32 for each channel")
    _check_devices(x, weight, bias)
    _check_without_gradient(weight, bias)
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device, memory_format=suggest_memory_format(x))


def _fake_dequantize(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32)


@dataclass(slots=True)
class _Packed:
    """A weight in the processor's own order, in each requested form, made from one version of the plain weight."""

    weight: weakref.ref[torch.Tensor]
    facts: tuple[object, ...]
    zeros: torch.Tensor
    forms: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    for_few_rows: tuple[torch.Tensor, torch.Tensor | None, list[object], Any] | None = None
    """The scales, the bias, what is known of them, and the weight in FBGEMM's order with these."""
    calls: dict[object, tuple[torch.Tensor, torch.Tensor | None, tuple[Any, ...]]] = field(default_factory=dict)
    """The calls that were checked: their scales and bias, and all that oneDNN is given besides the input."""


_packed: dict[int, _Packed] = {}
"""The packed form of each weight, by the identity of the weight: each layer looks it up at each forward."""


def _packed_of(weight: torch.Tensor) -> _Packed | None:
    """Return the packed form of a weight in its present version, if there is one."""
    found = _packed.get(id(weight))
    return found if found is not None and found.weight() is weight and found.facts == _facts(weight) else None


def _forget(key: int, gone: weakref.ref[torch.Tensor]) -> None:
    found = _packed.get(key)
    if found is not None and found.weight is gone:
        del _packed[key]


class _Call:
    """A call of a layer, identified by all that its checks look at: a call like an earlier one is not checked again.

    One is made for each forward of each layer, so the class is written for speed.
    """

    __slots__ = ("_bias", "_key", "_scales", "_weight")

    def __init__(self, x: torch.Tensor, point: tuple[float | None, int], layer: Any, rest: Iterable[Any]) -> None:
        """Note a call of a layer, its weight, scales and bias, on an input; `rest` are its other arguments."""
        self._weight, self._scales, self._bias = weight, scales, bias = layer
        self._key: tuple[object, ...] | None = None
        """The properties that the checks look at; None if the call cannot be compared with others."""
        if point[0] is None or weight.is_inference() or scales.is_inference() or scales.requires_grad:
            return
        if bias is not None and (bias.is_inference() or bias.requires_grad):
            return
        self._key = (
            x.shape,
            x.dtype,
            x.device,
            point,
            _facts(scales),
            None if bias is None else _facts(bias),
            *[tuple(each) if type(each) is list else each for each in rest],
        )

    @property
    def known(self) -> tuple[Any, ...] | None:
        """The arguments of oneDNN, besides the input, when a call like this was checked; None if none was."""
        held = None if self._key is None else _packed_of(self._weight)
        found = None if held is None else held.calls.get(self._key)
        return found[2] if found is not None and found[0] is self._scales and found[1] is self._bias else None

    def keep(self, given: tuple[Any, ...]) -> None:
        """Keep the arguments of oneDNN, now that the call was checked."""
        held = None if self._key is None else _packed_of(self._weight)
        if held is not None:
            if len(held.calls) >= _FORMS:
                held.calls.clear()
            held.calls[self._key] = self._scales, self._bias, given


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a call like this takes for granted of a tensor: another `.data` is no write that anybody counts.

    The storage is among it, since whoever keeps these keeps it, so that no other data comes to lie at its address.
    """
    data = tensor.untyped_storage(), tensor.data_ptr()
    return tensor._version, *data, tensor.shape, tensor.is_contiguous(), tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True)
class _Layer:
    """The integer weights of a layer, for its outputs and inputs, and the numbers for which they stand."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def check(self, x: torch.Tensor, *, dimensions: int) -> None:
        """Check all that oneDNN takes for granted; it goes by sizes, not by strides."""
        weight = self.weight
        _check_without_gradient(x, weight, self.scales, *(() if self.bias is None else (self.bias,)))
        _check(weight.dtype is torch.int8 and weight.dim() == dimensions, "weights are int8, of the layer's dimensions")
        _check(weight.is_contiguous() and weight.numel() > 0, "weights are contiguous, and not empty")
        for each in (self.scales, self.bias):
            fits = each is None or (each.dtype is torch.float32 and each.shape == weight.shape[:1])
            _check(fits and (each is None or each.is_contiguous()), "scales and bias have a float32 for each output")
        _check(x.dtype in (torch.uint8, torch.float32), "inputs are uint8 or float32")

    @property
    def scales_and_bias(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The scales, zero points and bias of the layer; the zero points of weights are zero."""
        return self.scales, self._held().zeros, self.bias

    def packed_for_few_rows(self) -> Any:
        """Return the weights in FBGEMM's order, with the scales and the bias, of which it has copies."""
        held, of = self._held(), (self.scales, self.bias)
        facts: list[object] = [None if each is None or each.is_inference() else _facts(each) for each in of]
        kept = held.for_few_rows
        if kept is not None and kept[0] is self.scales and kept[1] is self.bias and kept[2] == facts:
            return kept[3]
        _silence_quint8()
        weight = torch._make_per_channel_quantized_tensor(self.weight, self.scales.double(), held.zeros.long(), 0)
        packed = torch.ops.quantized.linear_prepack(weight, self.bias)
        if not any(each is not None and each.is_inference() for each in of):  # whose writes nobody counts
            held.for_few_rows = (*of, facts, packed)
        return packed

    def packed(self, form: tuple[object, ...], pack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the integers in the order of the processor; they are packed once."""
        forms = self._held().forms
        found = forms.get(form)
        if found is None:
            if len(forms) >= _FORMS:
                forms.clear()
            found = forms[form] = pack()
        return found

    def _held(self) -> _Packed:
        counts = not self.weight.is_inference()  # without counts of writes, each call packs it
        if counts and (held := _packed_of(self.weight)) is not None:
            return held
        key = id(self.weight)
        weight = weakref.ref(self.weight, lambda gone: _forget(key, gone))
        facts = _facts(self.weight) if counts else ()
        held = _Packed(weight, facts, torch.zeros(len(self.weight), dtype=torch.int32))
        if counts:
            _packed[key] = held
        return held


@dataclass(frozen=True, slots=True)
class _Window:
    """The options of a convolution."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def options(self) -> tuple[list[int], list[int], list[int], int]:
        """The four options in the form that torch's operators take."""
        return list(self.stride), list(self.padding), list(self.dilation), self.groups

    def shape_of_result(self, x: torch.Tensor, weight: torch.Tensor) -> list[Any]:
        """Return the shape of the result for a batch; raise FxlibError if there is no result."""
        stride, padding, dilation, groups = self.options
        _check(x.dim() == 4, "a convolution takes 3 dimensions, or a batch of 4")
        _check(len(stride) == len(padding) == len(dilation) == 2, "stride, padding and dilation are two numbers each")
        _check(min(*stride, *dilation, groups) >= 1 and min(padding) >= 0, "stride, dilation and groups are positive")
        _check(max(*stride, *padding, *dilation) < _REACH, f"stride, padding and dilation are less than {_REACH:,}")
        _check(x.shape[1] == weight.shape[1] * groups, "the input's channels are not the weight's")
        _check(weight.shape[0] % groups == 0, "the output channels are no multiple of the groups")
        reach = [step * (size - 1) + 1 for step, size in zip(dilation, weight.shape[2:], strict=True)]
        free = [size + 2 * more - each for size, more, each in zip(x.shape[2:], padding, reach, strict=True)]
        _check(min(free) >= 0, "the kernel is larger than its input")
        return [x.shape[0], weight.shape[0], *(each // step + 1 for each, step in zip(free, stride, strict=True))]


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
            _check(x.dtype is torch.uint8, "an input of known scale is uint8")
            _check_levels(scale, zero_point)
            return cls(x, scale, zero_point)
        _check(x.dtype is torch.float32, "an input of unknown scale is float32")
        # aminmax copies a tensor that is not contiguous.
        least, most = torch.aminmax(x if x.is_contiguous() or x.dim() != 4 else x.permute(0, 2, 3, 1))
        found = max(-float(least), float(most)) / (_MIDDLE - 1)
        if not math.isfinite(found):
            return None
        scale = found if found > 0.0 and math.isfinite(1.0 / found) else 1.0
        return cls(_quantize(x, scale, _MIDDLE), scale, _MIDDLE)


@dataclass(frozen=True, slots=True)
class _Result:
    """The form of a layer's result: float32, or uint8 if there is a scale."""

    scale: float | None
    zero_point: int
    activation: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return torch.float32 if self.scale is None else torch.uint8

    def without_values(self, shape: Sequence[int], order: torch.memory_format) -> torch.Tensor:
        """Return the result for an input without a range: NaN if the dtype has it. For an empty input it is empty."""
        made = torch.empty(list(shape), dtype=self.dtype, device="cpu", memory_format=order)
        return made.fill_(math.nan if self.scale is None else self.zero_point)

    def options(self, kind: str) -> tuple[float, int, torch.dtype, str, list[float], str]:
        """Return all of this in the form that oneDNN's operators take."""
        scale = 1.0 if self.scale is None else self.scale
        _check_levels(scale, self.zero_point)
        _check(self.activation in ACTIVATIONS[kind], f"activations are {', '.join(sorted(ACTIVATIONS[kind]))}")
        return scale, self.zero_point, self.dtype, *_POST_OPS[self.activation]


def _check_without_gradient(*tensors: torch.Tensor) -> None:
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    _check(not recorded, "int8 layers give no gradients, and one of their tensors asks for some")


def _check_uint8(*tensors: torch.Tensor) -> None:
    _check(all(each.dtype is torch.uint8 for each in tensors), "levels are uint8")


def _check_devices(*tensors: torch.Tensor | None) -> None:
    """Check that no tensor without memory is among these: with such a tensor, torch would only pretend to compute."""
    devices = {each.device for each in tensors if each is not None}
    _check(len(devices) == 1, "tensors are on one device")


def _check_levels(scale: float, zero_point: int) -> None:
    _check(scale > 0.0 and math.isfinite(scale) and math.isfinite(1.0 / scale), "a scale is positive and finite")
    _check(0 <= zero_point <= LARGEST, f"a zero point is 0 to {LARGEST}")


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise FxlibError(problem, where="torch.ops.fxlib", hint="Have graphs with int8 layers made by `quantize`.")


@functools.cache
def _silence_quint8() -> None:
    """Let torch give its only warning that a later version drops the dtype; the versions admitted here have it.

    It is not done at import, since the first operator decides which of the processor's instructions torch uses.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


_LIBRARY: Final = torch.library.Library(NAMESPACE, "DEF")
for _schema, _computes, _pretends in (
    ("quantize(Tensor x, float scale, int zero_point) -> Tensor", _quantize, _fake_quantize),
    (f"int8_linear({_LAYER}, {_RESULT}) -> Tensor", _linear, _fake_linear),
    (f"int8_conv2d({_LAYER}, {_WINDOW}, {_RESULT}) -> Tensor", _conv2d, _fake_conv2d),
    (f"int8_conv2d_add({_LAYER}, {_WINDOW}, Tensor {_OTHER}) -> Tensor", _conv2d_add, _fake_conv2d_add),
    (f"int8_conv2d_add_over({_LAYER}, {_WINDOW}, Tensor(a!) {_OTHER}) -> Tensor", _conv2d_add_over, _fake_conv2d_add),
    (f"int8_max_pool2d(Tensor x, {_POOLED}) -> Tensor", _max_pool2d, _fake_max_pool2d),
    (f"int8_norm({_SCALED}, Tensor weight, Tensor bias, {_SCALE_OUT}) -> Tensor", _norm, _fake_norm),
    (f"dequantize({_SCALED}) -> Tensor", _dequantize, _fake_dequantize),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _computes, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{_schema.partition('(')[0]}", _pretends, lib=_LIBRARY)
