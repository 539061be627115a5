"""The operators on int8 weights, computed on quantized tensors with packed weights; the bits are those on integers.

A kernel computes what its operator computes wherever that is certain from its inputs alone. For all others, an input of
another shape or a weight that was written to, it calls the operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from fxlib.errors import FxlibError
from fxlib.runtime.int8 import operators, quint8
from fxlib.runtime.int8.layers import Layer, Result, Window, check, check_levels, fbgemm_rows
from fxlib.runtime.int8.quint8 import as_integers, as_levels

Function: TypeAlias = Callable[..., Any]
Point: TypeAlias = tuple[float, int]
"""The scale and the zero point of a quantized tensor."""
Versions: TypeAlias = Sequence[tuple[torch.Tensor, int]]
"""Weights, each with torch's count of the writes to it when it was packed."""
_KINDS: Final = 64
"""The number of kinds of inputs that a kernel remembers."""
_UNKNOWN: Final[Any] = object()
"""The mark of a kind of inputs that a kernel has not met."""
_AFTER_ADDED: Final = 5
"""The number of arguments of a sum that come after the levels to add."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator on quantized tensors."""

    takes: Point | None
    """The point of its input; None if that is not quantized yet."""
    returns: Point | None
    """The point of its result; None if that is float32."""
    packed: Function
    """The operator with all of its arguments but the first."""
    fits: Callable[[torch.Tensor], bool]
    """Whether an input is one for which `packed` computes what the operator on integers computes."""

    def function(self, operator: Function, others: Sequence[Any], versions: Versions) -> Function:
        """Return a function of the input: `packed` if that fits, or else the operator on integers.

        Args:
            operator: the operator that the dispatcher knows.
            others: all of its arguments but the first.
            versions: the weights among these; the graph itself may write to them before it gets here.
        """
        kinds: dict[tuple[object, ...], bool] = {}
        is_here = quint8.is_plain if self.takes is None else is_quantized

        def fits(x: torch.Tensor) -> bool:
            if not is_here(x):
                return False
            for tensor, version in versions:
                if tensor._version != version:
                    return False
            kind = x.shape, x.stride(), x.dtype
            if (found := kinds.get(kind)) is None:
                if len(kinds) >= _KINDS:
                    kinds.clear()
                found = kinds[kind] = x.numel() > 0 and self.fits(x)
            return found

        def run(x: torch.Tensor) -> torch.Tensor:
            if fits(x):
                return self.packed(x)
            found = operator(x if self.takes is None else integers_of(x), *others)
            return found if self.returns is None else levels_of(found, *self.returns)

        return run


@dataclass(frozen=True, slots=True)
class Sum:
    """A convolution to which other levels are added; both are quantized tensors."""

    takes: Point
    adds: Point
    """The point of what is added."""
    returns: Point
    layer: Layer
    window: Window
    relu: bool

    @classmethod
    def of(cls, scale: Any, zero_point: Any, weight: Any, scales: Any, bias: Any, *others: Any) -> Sum:
        """Return what computes an operator of these arguments, those but the input and the levels to add."""
        layer, window = Layer(weight, scales, bias), Window(*others[:4])
        layer.check(torch.empty(0, dtype=torch.uint8), dimensions=4)
        window.check(weight)
        adds, returns = _point(*others[4:6]), _point(*others[6:8])
        return cls(_point(scale, zero_point), adds, returns, layer, window, others[8])

    def function(self, operator: Function, others: Sequence[Any], versions: Versions) -> Function:
        """Return a function of both inputs, which may write to the second one.

        Args:
            operator: the operator that the dispatcher knows.
            others: all of its arguments but the inputs.
            versions: the weights among these; the graph itself may write to them before it gets here.
        """
        copies = operator is torch.ops.fxlib.int8_conv2d_add.default
        known: dict[tuple[object, ...], Function | None] = {}

        def added(x: torch.Tensor, other: torch.Tensor) -> Function | None:
            """Return what adds without a check; None if the operator is to look at these inputs."""
            if not (is_quantized(x) and is_quantized(other)):
                return None
            for tensor, version in versions:
                if tensor._version != version:
                    return None
            kind = x.shape, other.shape, other.stride()
            if (found := known.get(kind, _UNKNOWN)) is _UNKNOWN:
                if len(known) >= _KINDS:
                    known.clear()
                found = known[kind] = self._adding(x, other)
            return found

        def run(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            if (add := added(x, other)) is None:
                position = len(others) - _AFTER_ADDED
                given = *others[:position], integers_of(other), *others[position:]
                return levels_of(operator(integers_of(x), *given), *self.returns)
            total = as_integers(other)
            if copies:
                total = total.clone(memory_format=torch.preserve_format)
            return as_levels(add(as_integers(x), total), *self.returns)

        return run

    def _adding(self, x: torch.Tensor, other: torch.Tensor) -> Function | None:
        try:
            shape = self.window.shape_of_result(x, self.layer.weight)
        except FxlibError:  # the operator on integers raises it
            return None
        if not x.numel() or list(other.shape) != shape or self.window.lies_in_padding(x, self.layer.weight):
            return None  # the operator on integers pads, or raises
        return operators.adding(x.shape, self.takes, self.layer, self.window, (*self.adds, *self.returns, self.relu))


def _quantize(*point: Any) -> Kernel:
    returns = _point(*point)
    return Kernel(None, returns, lambda x: quint8.quantized(x, *returns), lambda x: x.dtype is torch.float32)


def _linear(scale: Any, zero_point: Any, weight: Any, scales: Any, bias: Any, *result: Any) -> Kernel:
    layer, made, takes = Layer(weight, scales, bias), Result(*result), _point(scale, zero_point)
    _check_layer(layer, made, "linear", dimensions=2)
    returns = None if made.scale is None else (made.scale, made.zero_point)
    outputs, inputs = weight.shape
    relu = made.relu if 1e-30 < scale < 1e30 else None
    most_numbers = fbgemm_rows() * inputs
    few, many = functools.cache(layer.for_linear), functools.cache(lambda: operators.many_rows(layer, made))

    def multiply(levels: torch.Tensor) -> torch.Tensor:
        if relu is None or levels.numel() > most_numbers:
            found = operators.MANY_ROWS(as_integers(levels).reshape(-1, inputs), *takes, *many())
            found = found.reshape(*levels.shape[:-1], outputs)
            return found if returns is None else as_levels(found, *returns)
        if returns is None:
            return quint8.LINEAR_TO_FLOAT[relu](levels.dequantize(), *takes, few())
        return quint8.LINEAR[relu](levels, few(), *returns)

    return Kernel(takes, returns, multiply, lambda levels: levels.dim() > 1 and levels.shape[-1] == inputs)


def _convolution(scale: Any, zero_point: Any, weight: Any, scales: Any, bias: Any, *others: Any) -> Kernel | None:
    layer, window, made = Layer(weight, scales, bias), Window(*others[:4]), Result(*others[4:])
    takes = _point(scale, zero_point)
    if made.scale is None or made.relu is None:
        return None
    _check_layer(layer, made, "convolution", dimensions=4)
    window.check(weight)
    convolve, returns = quint8.CONVOLUTION[made.relu], (made.scale, made.zero_point)
    packed = layer.for_convolution(window)

    def fits(levels: torch.Tensor) -> bool:
        try:
            return bool(window.shape_of_result(levels, weight)) and not window.lies_in_padding(levels, weight)
        except FxlibError:  # the operator on integers raises it
            return False

    return Kernel(takes, returns, lambda levels: convolve(levels, packed, *returns), fits)


def _norm(scale: Any, zero_point: Any, weight: Any, bias: Any, *point: Any) -> Kernel:
    returns = _point(*point)
    for each in (weight, bias):
        check(each.dtype is torch.float32 and each.is_contiguous(), "a norm's weight and bias are float32")

    def fits(levels: torch.Tensor) -> bool:
        return _is_of_images(levels) and weight.shape == bias.shape == levels.shape[1:2]

    return Kernel(_point(scale, zero_point), returns, lambda levels: quint8.norm(levels, weight, bias, *returns), fits)


def max_pool(point: Point, *options: Any) -> Kernel:
    """Return what computes a max pooling of levels of this point."""
    sizes, ceil_mode = [list(each) for each in options[:4]], options[4]

    def fits(levels: torch.Tensor) -> bool:
        return _is_of_images(levels) and operators.max_pool2d(as_integers(levels), *options) is not None

    return Kernel(point, point, lambda levels: torch.ops.quantized.max_pool2d.default(levels, *sizes, ceil_mode), fits)


def avg_pool(point: Point, *options: Any) -> Kernel:
    """Return what computes an average pooling of levels of this point."""
    sizes = [list(each) for each in options]

    def fits(levels: torch.Tensor) -> bool:
        return _is_of_images(levels) and operators.avg_pool2d(as_integers(levels), *options) is not None

    return Kernel(point, point, lambda levels: as_levels(operators.averaged(as_integers(levels), *sizes), *point), fits)


POOLINGS: Final[Mapping[Function, Callable[..., Kernel]]] = {
    operators.max_pool2d: max_pool,
    operators.avg_pool2d: avg_pool,
}
"""The function that makes the kernel of a pooling, of the point of its input and of its options."""


def _check_layer(layer: Layer, result: Result, kind: str, *, dimensions: int) -> None:
    layer.check(torch.empty(0, dtype=torch.uint8), dimensions=dimensions)
    result.options(kind)


def _is_of_images(levels: torch.Tensor) -> bool:
    """Return whether levels are images, channels last; memory may be in both orders, and torch then takes either.

    Torch goes by the strides of dimensions of size one, too, when it chooses the order of a result.
    """
    if levels.dim() != 4 or levels.is_contiguous():
        return False
    _, channels, height, width = levels.shape
    return levels.stride() == (channels * height * width, 1, channels * width, channels)


def _point(scale: Any, zero_point: Any) -> Point:
    check(scale is not None, "levels have a scale")
    check_levels(scale, zero_point)
    return scale, zero_point


KERNELS: Final[Mapping[Function, Callable[..., Kernel | Sum | None]]] = {
    operators.quantize: _quantize,
    operators.linear: _linear,
    operators.conv2d: _convolution,
    operators.norm: _norm,
    operators.conv2d_add: Sum.of,
    operators.conv2d_add_over: Sum.of,
}
"""The function that makes the kernel of an operator, of all of its arguments but its inputs."""


def divided(computes: Function | None, args: tuple[Any, ...]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return an operator's inputs, which are values of the graph, and its other arguments."""
    if computes not in (operators.conv2d_add, operators.conv2d_add_over):
        return args[:1], args[1:]
    position = len(args) - _AFTER_ADDED - 1
    return (args[0], args[position]), (*args[1:position], *args[position + 1 :])


def join(dim: int, point: Point) -> Function:
    """Return a function that joins quantized tensors of one point.

    Torch's own copies only images, channels last, along their channels; it computes with the numbers of others, which
    extreme scales do not survive. Where memory may be seen as of either order, it would choose another one.
    """

    def run(given: list[torch.Tensor]) -> torch.Tensor:
        for each in given:
            if dim not in (1, -3) or not is_quantized(each) or not _is_of_images(each):
                return levels_of(torch.cat([integers_of(value) for value in given], dim), *point)
        return torch.ops.quantized.cat.default(given, dim, *point)

    return run


def is_quantized(x: Any) -> bool:
    """Return whether a value is a quantized tensor."""
    return isinstance(x, torch.Tensor) and x.dtype is torch.quint8


def levels_of(x: Any, scale: float, zero_point: int) -> Any:
    """Return the quantized tensor of integers; a value that is none of these stays what it is, for the operators."""
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.uint8 or not quint8.is_plain(x):
        check(not is_quantized(x), "an input of known scale is uint8")
        return x
    return as_levels(x, scale, zero_point)


def integers_of(x: Any) -> Any:
    """Return the integers of a quantized tensor; a value that was none stays what it is."""
    return as_integers(x) if is_quantized(x) else x
