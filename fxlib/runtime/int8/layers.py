"""Int8 layers and what is checked of them: weights, windows and results, and weights in the orders of processors.

Weights travel as plain integers, and are packed where a module first runs. A layer whose tensors are those of an
earlier call, unchanged, is not checked again.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn import functional

from fxlib.errors import FxlibError
from fxlib.runtime.int8 import quint8
from fxlib.utils.hardware import instructions

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
FEW_ROWS: Final = 96
"""The number of a linear layer's inputs up to which FBGEMM is faster than oneDNN, measured on a processor with AVX2."""
_FEW_ROWS_WITH_VNNI: Final = 12
"""The same number, measured on a processor with AVX512, VNNI and AMX."""
_MANY_CHANNELS: Final = 64
"""The number of channels from which on FBGEMM is faster in depthwise convolutions, measured there, too."""
REACH: Final = 1 << 20
"""Bound of a window's stride, padding and dilation: oneDNN counts in 32 bits, and adds up padded zero points."""
_FORMS: Final = 16
"""The number of forms in which a weight is kept packed; without a limit, computed windows could make it grow."""


@dataclass(slots=True)
class WithScales:
    """A weight in the orders of torch's own quantized operators, with scales and a bias, as these were."""

    scales: torch.Tensor
    bias: torch.Tensor | None
    facts: Sequence[object]
    forms: dict[tuple[object, ...], Any] = field(default_factory=dict)


@dataclass(slots=True)
class Packed:
    """A weight in the processor's own order, in each requested form, made from one version of the plain weight."""

    weight: weakref.ref[torch.Tensor]
    facts: tuple[object, ...]
    zeros: torch.Tensor
    forms: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    with_scales: WithScales | None = None
    """The weight packed by torch's own quantized operators, with the scales and the bias of the last call."""
    calls: dict[object, tuple[torch.Tensor, torch.Tensor | None, tuple[Any, ...]]] = field(default_factory=dict)
    """The calls that were checked: their scales and bias, and all that oneDNN is given besides the input."""


_packed: dict[int, Packed] = {}
"""The packed form of each weight, by the identity of the weight: each layer looks it up at each forward."""


def packed_of(weight: torch.Tensor) -> Packed | None:
    """Return the packed form of a weight in its present version, if there is one."""
    found = _packed.get(id(weight))
    return found if found is not None and found.weight() is weight and found.facts == facts_of(weight) else None


def _forget(key: int, gone: weakref.ref[torch.Tensor]) -> None:
    found = _packed.get(key)
    if found is not None and found.weight is gone:
        del _packed[key]


class Call:
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
            facts_of(scales),
            None if bias is None else facts_of(bias),
            *[tuple(each) if type(each) is list else each for each in rest],
        )

    @property
    def known(self) -> tuple[Any, ...] | None:
        """The arguments of oneDNN, besides the input, when a call like this was checked; None if none was."""
        held = None if self._key is None else packed_of(self._weight)
        found = None if held is None else held.calls.get(self._key)
        return found[2] if found is not None and found[0] is self._scales and found[1] is self._bias else None

    def keep(self, given: tuple[Any, ...]) -> None:
        """Keep the arguments of oneDNN, now that the call was checked."""
        held = None if self._key is None else packed_of(self._weight)
        if held is not None:
            if len(held.calls) >= _FORMS:
                held.calls.clear()
            held.calls[self._key] = self._scales, self._bias, given


def facts_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a call like this takes for granted of a tensor: another `.data` is no write that anybody counts.

    The storage is among it, since whoever keeps these keeps it, so that no other data comes to lie at its address.
    """
    data = tensor.untyped_storage(), tensor.data_ptr()
    return tensor._version, *data, tensor.shape, tensor.is_contiguous(), tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True)
class Layer:
    """The integer weights of a layer, for its outputs and inputs, and the numbers for which they stand."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def check(self, x: torch.Tensor, *, dimensions: int) -> None:
        """Check all that oneDNN takes for granted; it goes by sizes, not by strides."""
        weight = self.weight
        check_without_gradient(x, weight, self.scales, *(() if self.bias is None else (self.bias,)))
        check(weight.dtype is torch.int8 and weight.dim() == dimensions, "weights are int8, of the layer's dimensions")
        check(weight.is_contiguous() and weight.numel() > 0, "weights are contiguous, and not empty")
        for each in (self.scales, self.bias):
            fits = each is None or (each.dtype is torch.float32 and each.shape == weight.shape[:1])
            check(fits and (each is None or each.is_contiguous()), "scales and bias have a float32 for each output")
        check(x.dtype in (torch.uint8, torch.float32), "inputs are uint8 or float32")

    @property
    def scales_and_bias(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The scales, zero points and bias of the layer; the zero points of weights are zero."""
        return self.scales, self._held().zeros, self.bias

    def packed_with_scales(self, pack: Callable[..., Any], engine: quint8.Engine, *window: Any) -> Any:
        """Return the weights in an engine's order, with the scales and the bias, of which it has copies.

        Args:
            pack: torch's function that packs for a kind of layer, such as `torch.ops.quantized.linear_prepack`.
            engine: the library that computes.
            window: the options of a convolution.
        """
        held, of = self._held(), (self.scales, self.bias)
        known = [None if each is None or each.is_inference() else facts_of(each) for each in of]
        kept = held.with_scales
        if kept is None or kept.scales is not self.scales or kept.bias is not self.bias or kept.facts != known:
            kept = WithScales(self.scales, self.bias, known)
            if not any(each is not None and each.is_inference() for each in of):  # whose writes nobody counts
                held.with_scales = kept
        form = engine, *[tuple(each) if isinstance(each, list) else each for each in window]
        if form not in kept.forms:
            if len(kept.forms) >= _FORMS:
                kept.forms.clear()
            kept.forms[form] = quint8.packed(pack, engine, self.weight, self.scales, self.bias, *window)
        return kept.forms[form]

    def for_linear(self) -> Any:
        """Return the weights of a linear layer as FBGEMM takes them."""
        return self.packed_with_scales(torch.ops.quantized.linear_prepack, "fbgemm")

    def for_convolution(self, window: Window) -> Any:
        """Return the weights of a convolution as the engine takes them that is the faster one for it."""
        engine: quint8.Engine = "fbgemm" if self.is_depthwise(window) else "onednn"
        return self.packed_with_scales(torch.ops.quantized.conv2d_prepack, engine, *window.options)

    def is_depthwise(self, window: Window) -> bool:
        """Return whether each output has a single input, and FBGEMM is faster: 100 times, where two share an input."""
        outputs, inputs = self.weight.shape[:2]
        return inputs == 1 and window.groups % 8 == 0 and (window.groups >= _MANY_CHANNELS or outputs != window.groups)

    def packed(self, form: tuple[object, ...], pack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the integers in the order of the processor; they are packed once."""
        forms = self._held().forms
        found = forms.get(form)
        if found is None:
            if len(forms) >= _FORMS:
                forms.clear()
            found = forms[form] = pack()
        return found

    def _held(self) -> Packed:
        counts = not self.weight.is_inference()  # without counts of writes, each call packs it
        if counts and (held := packed_of(self.weight)) is not None:
            return held
        key = id(self.weight)
        weight = weakref.ref(self.weight, lambda gone: _forget(key, gone))
        facts = facts_of(self.weight) if counts else ()
        held = Packed(weight, facts, torch.zeros(len(self.weight), dtype=torch.int32))
        if counts:
            _packed[key] = held
        return held


@dataclass(frozen=True, slots=True)
class Window:
    """The options of a convolution."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def options(self) -> tuple[list[int], list[int], list[int], int]:
        """The four options in the form that torch's operators take."""
        return list(self.stride), list(self.padding), list(self.dilation), self.groups

    def check(self, weight: torch.Tensor) -> None:
        """Check the options of a convolution by these weights; raise FxlibError if there are none like these."""
        stride, padding, dilation, groups = self.options
        check(len(stride) == len(padding) == len(dilation) == 2, "stride, padding and dilation are two numbers each")
        check(min(*stride, *dilation, groups) >= 1 and min(padding) >= 0, "stride, dilation and groups are positive")
        check(max(*stride, *padding, *dilation) < REACH, f"stride, padding and dilation are less than {REACH:,}")
        check(weight.shape[0] % groups == 0, "the output channels are no multiple of the groups")

    def shape_of_result(self, x: torch.Tensor, weight: torch.Tensor) -> list[Any]:
        """Return the shape of the result for a batch; raise FxlibError if there is no result."""
        stride, padding, dilation, groups = self.options
        check(x.dim() == 4, "a convolution takes 3 dimensions, or a batch of 4")
        self.check(weight)
        check(x.shape[1] == weight.shape[1] * groups, "the input's channels are not the weight's")
        reach = [step * (size - 1) + 1 for step, size in zip(dilation, weight.shape[2:], strict=True)]
        free = [size + 2 * more - each for size, more, each in zip(x.shape[2:], padding, reach, strict=True)]
        check(min(free) >= 0, "the kernel is larger than its input")
        return [x.shape[0], weight.shape[0], *(each // step + 1 for each, step in zip(free, stride, strict=True))]

    def lies_in_padding(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether a window may touch nothing of a batch but its padding: oneDNN then reads or sums up others."""
        return any(
            more > spacing * (over - 1) or (more > 0 and spacing > size)
            for size, over, more, spacing in zip(
                x.shape[2:], weight.shape[2:], self.padding, self.dilation, strict=True
            )
        )

    def padded(self, x: torch.Tensor, zero_point: int) -> torch.Tensor:
        """Return a batch, of levels or of numbers, with its padding as values of its own."""
        rows, columns = self.padding
        zero = 0 if x.is_floating_point() else zero_point
        return functional.pad(x, (columns, columns, rows, rows), value=zero)


@dataclass(frozen=True, slots=True)
class Result:
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

    @property
    def relu(self) -> bool | None:
        """Whether the activation is a ReLU, or nothing; None if it is anything else.

        Where no level stands for more than six, a ReLU6 is a ReLU.
        """
        if self.activation == "relu6" and self.scale is not None and self.zero_point == 0:
            return True if LARGEST * self.scale <= 6.0 else None
        return {"none": False, "relu": True}.get(self.activation)

    def options(self, kind: str) -> tuple[float, int, torch.dtype, str, list[float], str]:
        """Return all of this in the form that oneDNN's operators take."""
        scale = 1.0 if self.scale is None else self.scale
        check_levels(scale, self.zero_point)
        check(self.activation in ACTIVATIONS[kind], f"activations are {', '.join(sorted(ACTIVATIONS[kind]))}")
        return scale, self.zero_point, self.dtype, *_POST_OPS[self.activation]


@functools.cache
def fbgemm_rows() -> int:
    """Return the number of a linear layer's inputs up to which FBGEMM is faster than oneDNN on this processor."""
    return _FEW_ROWS_WITH_VNNI if "avx512_vnni" in instructions() else FEW_ROWS


def check_without_gradient(*tensors: torch.Tensor) -> None:
    """Check that no gradient is asked for."""
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    check(not recorded, "int8 layers give no gradients, and one of their tensors asks for some")


def check_uint8(*tensors: torch.Tensor) -> None:
    """Check that tensors hold levels."""
    check(all(each.dtype is torch.uint8 for each in tensors), "levels are uint8")


def check_devices(*tensors: torch.Tensor | None) -> None:
    """Check that no tensor without memory is among these: with such a tensor, torch would only pretend to compute."""
    devices = {each.device for each in tensors if each is not None}
    check(len(devices) == 1, "tensors are on one device")


def check_levels(scale: float, zero_point: int) -> None:
    """Check that levels stand for numbers."""
    check(scale > 0.0 and math.isfinite(scale) and math.isfinite(1.0 / scale), "a scale is positive and finite")
    check(0 <= zero_point <= LARGEST, f"a zero point is 0 to {LARGEST}")


class Int8Error(FxlibError, RuntimeError):
    """An operator was given what it does not take, for which torch's own raise a RuntimeError, too."""


def check(holds: bool, problem: str) -> None:
    """Raise Int8Error, with the problem in words, if something does not hold."""
    if not holds:
        hint = "Give the model inputs that the original takes, and have graphs with int8 layers made by `quantize`."
        raise Int8Error(problem, where="torch.ops.fxlib", hint=hint)
