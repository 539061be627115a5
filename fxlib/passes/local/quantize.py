"""Run linear layers and convolutions on int8 weights.

The pass finds the layers, takes the ranges of their inputs from the workload's batches, leaves layers in float until
the results are within the bound, and puts the operators of `fxlib.runtime.int8` in the place of the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.modules.conv import _ConvNd
from typing_extensions import override

from fxlib.analysis.effects.gradients import may_leave_gradients
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.layers import Affine, Steadiness, affine_of, is_relu, only_user
from fxlib.analysis.operators.arguments import arguments_of
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import place_of
from fxlib.passes.infra.folded_values import CHANNELS_LAST, become, hold, read, sweep
from fxlib.reasons import Declined, Reason
from fxlib.runtime import int8, is_call, is_issue
from fxlib.runtime.submodules import submodule
from fxlib.spec.calibration import LayerRange
from fxlib.spec.inputs import Batch
from fxlib.spec.workload import MAX_CALIBRATION
from fxlib.utils.compare import largest_error

_OPERATORS = torch.ops.fxlib
_LEAST_VALUES = 100
"""Of values that are alike, one more lies outside of the range of so many others with a chance of 2 in 101."""


@register_pass("quantize", preserves="lossy", needs=frozenset({"weights", "eval_mode"}), version="2")
class Quantize(GraphPass):
    """Run linear layers and two-dimensional convolutions on int8 weights and inputs, with sums in 32 bits.

    Weights have a scale for each output channel. The range of a layer's input is the one that it has over the
    workload's real batches, where there are any and the program makes no remote calls, or the one that the workload
    tells (`Workload.ranges`); otherwise each forward takes that of its own input. With a bound on the error
    (`Context.max_relative_error`) and batches to measure it on, the layers that move the results most, each alone, stay
    in float until the rest is within the bound.
    """

    least_weights: int = 4096
    """Layers with fewer weights stay in float: they take no time that could be saved."""
    trials: int = 64
    """The number of groups of layers whose share of the error is measured; a small model has one for each layer."""

    @override
    @torch.no_grad()
    def run(self, module: GraphModule, context: Context) -> PassResult:
        found = _Search(module, context.get(Effects), self.least_weights)
        layers, declined = found.layers, found.declined
        if not layers:
            return PassResult(module, changes=0, declined=tuple(declined))
        batches, ranges = _batches(module, context), Ranges()
        told = () if context.workload is None or batches else context.workload.ranges
        if batches:
            layers, ranges = self._calibrated(module, layers, batches, context.max_relative_error, declined)
        elif told:
            layers, ranges = self._as_told(layers, told, declined)
        for layer in layers:
            _rewrite(module, layer, ranges.get(layer.input))
        _chain(module)
        for layer in layers:
            _restore_layout(module, layer)
        sweep(module)
        return PassResult(module, changes=len(layers), declined=tuple(declined))

    @torch.no_grad()
    def ranges(self, module: GraphModule, context: Context) -> tuple[LayerRange, ...]:
        """Return what a pass without the workload's batches needs to do what this one would; `module` stays as it is.

        Returns:
            Nothing where there are no layers, or no batches that the program can be run on here.
        """
        layers, batches = _Search(module, context.get(Effects), self.least_weights).layers, _batches(module, context)
        if not layers or not batches:
            return ()
        declined = list[Declined]()
        _, found = self._calibrated(module, layers, batches, context.max_relative_error, declined)
        too_far = {each.node: each.detail for each in declined if each.reason is Reason.ERROR_BOUND}
        return tuple(
            LayerRange(
                weights=weights,
                use=use,
                least=found[layer.input].least,
                most=found[layer.input].most,
                values=found[layer.input].values,
                too_far=too_far.get(layer.node.name, ""),
            )
            for (weights, use), layer in _named(layers).items()
        )

    def _calibrated(
        self,
        module: GraphModule,
        layers: Sequence[Layer],
        batches: Sequence[Sequence[Any]],
        bound: float | None,
        declined: list[Declined],
    ) -> tuple[list[Layer], Ranges]:
        """Return the layers that batches let run on int8 weights, and the ranges of what all of them take."""
        reference, ranges = calibrate(module, layers, batches)
        kept = self._with_known_range(layers, ranges, declined)
        if bound is not None:
            kept = self._within(_Error(module, batches, reference, ranges), kept, bound, declined)
        return kept, ranges

    def _as_told(
        self, layers: Sequence[Layer], told: Sequence[LayerRange], declined: list[Declined]
    ) -> tuple[list[Layer], Ranges]:
        """Return the same of ranges that were taken elsewhere; of a layer that they leave out, nothing is known."""
        known = {(each.weights, each.use): each for each in told}
        ranges, kept = Ranges(), list[Layer]()
        for name, layer in _named(layers).items():
            found = known.get(name)
            ranges[layer.input] = Range() if found is None else Range(found.least, found.most, found.values)
            if found is not None and found.too_far:
                declined.append(Declined(node=layer.node.name, reason=Reason.ERROR_BOUND, detail=found.too_far))
            else:
                kept.append(layer)
        return self._with_known_range(kept, ranges, declined), ranges

    def _with_known_range(
        self, layers: Sequence[Layer], ranges: Mapping[Node, Range], declined: list[Declined]
    ) -> list[Layer]:
        kept = list[Layer]()
        for layer in layers:
            known = ranges[layer.input]
            if not known.is_finite:
                declined.append(Declined(node=layer.node.name, reason=Reason.CALIBRATION_NOT_FINITE))
            elif known.values < _LEAST_VALUES or known.least == known.most:
                found = f"{known.values} values" if known.values < _LEAST_VALUES else f"{known.values} zeros"
                declined.append(Declined(node=layer.node.name, reason=Reason.CALIBRATION_TOO_SMALL, detail=found))
            else:
                kept.append(layer)
        return kept

    def _within(self, measured: _Error, layers: Sequence[Layer], bound: float, declined: list[Declined]) -> list[Layer]:
        """Return the layers that keep the results within a bound together, those first that keep them best alone."""
        if not layers or measured.of(layers) <= bound:
            return list(layers)
        size = math.ceil(len(layers) / self.trials)
        groups = [layers[first : first + size] for first in range(0, len(layers), size)]
        alone = sorted(((measured.of(group), group) for group in groups), key=lambda each: each[0])
        fitting, least = 0, len(alone)
        while fitting < least - 1:  # the error grows with the layers: the longest beginning of them that fits
            middle = (fitting + least) // 2
            chosen = [layer for _, group in alone[:middle] for layer in group]
            fitting, least = (middle, least) if measured.of(chosen) <= bound else (fitting, middle)
        for error, group in alone[fitting:]:
            detail = f"{error:.2g} by itself, and {bound:.2g} is allowed for all"
            declined.extend(Declined(node=each.node.name, reason=Reason.ERROR_BOUND, detail=detail) for each in group)
        kept = {layer.node for _, group in alone[:fitting] for layer in group}
        return [each for each in layers if each.node in kept]


@dataclass(frozen=True, slots=True)
class Range:
    """What a tensor's values lay between; zero is always within."""

    least: float = 0.0
    most: float = 0.0
    values: int = 0
    """Number of the values."""

    @property
    def is_finite(self) -> bool:
        """Whether no value was infinite or no number."""
        return math.isfinite(self.least) and math.isfinite(self.most)

    @property
    def scale(self) -> float:
        """The distance of two neighbouring levels."""
        spread = (self.most - self.least) / int8.LARGEST
        return spread if spread > 0.0 and math.isfinite(1.0 / spread) else 1.0

    @property
    def zero_point(self) -> int:
        """The level of zero, which is exact."""
        return round(-self.least / self.scale)

    def with_values(self, value: torch.Tensor) -> Range:
        """Return the range that a tensor's values lie in, too."""
        if not value.numel():
            return self
        least, most = (float(each) for each in torch.aminmax(value))
        if not (math.isfinite(least) and math.isfinite(most)):
            return Range(-math.inf, math.inf)
        return Range(min(self.least, least), max(self.most, most), self.values + value.numel())


Ranges: TypeAlias = dict[Node, Range]
"""The ranges of the values that layers take."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """A layer that can run on int8 weights: the integers, and what they stand for."""

    affine: Affine
    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    options: tuple[Any, ...]
    """Stride, padding, dilation and groups of a convolution."""

    @property
    def node(self) -> Node:
        """Where it is called."""
        return self.affine.node

    @property
    def input(self) -> Node:
        """The value that it takes."""
        return self.affine.input

    @property
    def sources(self) -> frozenset[str]:
        """The names of the weights behind its integers."""
        bias = self.affine.bias
        return self.affine.weight.sources | (bias.sources if bias is not None else frozenset())

    @property
    def operator(self) -> Any:
        """The operator that computes it."""
        return (_OPERATORS.int8_linear if self.affine.kind == "linear" else _OPERATORS.int8_conv2d).default

    def __call__(self, value: torch.Tensor, known: Range | None) -> torch.Tensor:
        """Compute it."""
        scale, zero_point = (None, 0) if known is None else (known.scale, known.zero_point)
        given = value if scale is None else _OPERATORS.quantize(value, scale, zero_point)
        result: torch.Tensor = self.operator(
            given, scale, zero_point, self.weight, self.scales, self.bias, *self.options, None, 0, False
        )
        return result


def _named(layers: Sequence[Layer]) -> dict[tuple[tuple[str, ...], int], Layer]:
    """Return layers by the names of their weights and, where several have the same, by their number."""
    uses, found = Counter[tuple[str, ...]](), dict[tuple[tuple[str, ...], int], Layer]()
    for layer in layers:
        weights = tuple(sorted(layer.sources))
        found[weights, uses[weights]] = layer
        uses[weights] += 1
    return found


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as integers, with the scale of each output channel, the first dimension."""
    flat = weight.reshape(weight.shape[0], -1).double()
    scales = flat.abs().amax(1) / int8.WEIGHT_LIMIT
    scales = torch.where(scales > 0.0, scales, torch.ones_like(scales)).float()
    integers = (flat / scales.double()[:, None]).round_().clamp_(-int8.WEIGHT_LIMIT, int8.WEIGHT_LIMIT)
    return integers.to(torch.int8).reshape(weight.shape).contiguous(), scales


class _Search:
    """Finds the layers of a program that can run on int8 weights."""

    def __init__(self, module: GraphModule, effects: Effects, least_weights: int) -> None:
        self._module, self._least = module, least_weights
        self._steadiness = Steadiness(module, effects)
        self._blocked = None if may_leave_gradients(module) else Reason.MODE_BLOCKS
        self.layers: list[Layer] = []
        self.declined: list[Declined] = []
        for node in module.graph.nodes:
            affine = affine_of(module, node)
            if affine is not None:
                self._take(affine)

    def _take(self, affine: Affine) -> None:
        tensors = [each.tensor for each in (affine.weight, affine.bias) if each is not None]
        if affine.weight.tensor.numel() < self._least:
            return
        reason = self._blocked or self._misfit(affine, tensors) or self._steadiness.refusal(affine.node, tensors)
        options = None if reason else self._options(affine)
        if reason or options is None:
            self.declined.append(Declined(node=affine.node.name, reason=reason or Reason.NOT_INT8))
            return
        weight, scales = quantized(affine.weight.tensor)
        bias = None if affine.bias is None else affine.bias.tensor.detach().clone().contiguous()
        self.layers.append(Layer(affine=affine, weight=weight, scales=scales, bias=bias, options=options))

    def _misfit(self, affine: Affine, tensors: Sequence[torch.Tensor]) -> Reason | None:
        depthwise = affine.kind == "convolution" and affine.weight.tensor.shape[1] == 1
        fits = affine.kind == "linear" or (affine.kind == "convolution" and affine.dimensions == 2 and not depthwise)
        plain = all(each.dtype is torch.float32 and each.device.type == "cpu" for each in tensors)
        if not fits or not plain:
            return Reason.NOT_INT8
        if any(map(torch.Tensor.is_inference, tensors)):
            return Reason.WEIGHT_UNCOUNTED
        return None if all(bool(each.isfinite().all()) for each in tensors) else Reason.NOT_FINITE

    def _options(self, affine: Affine) -> tuple[Any, ...] | None:
        """Return stride, padding, dilation and groups; None if they are of a form that int8 convolutions lack."""
        if affine.kind == "linear":
            return ()
        if affine.node.op == "call_module":
            layer = submodule(self._module, str(affine.node.target))
            given: Mapping[str, Any] = vars(layer)
            if isinstance(layer, _ConvNd) and layer.padding_mode != "zeros":
                return None
        else:
            given = arguments_of(affine.node)
        padding = 0 if (padding := given.get("padding", 0)) == "valid" else padding
        pairs = [_pair(each) for each in (given.get("stride", 1), padding, given.get("dilation", 1))]
        return None if None in pairs else (*pairs, affine.groups)


def _pair(value: Any) -> list[int] | None:
    found = [value, value] if type(value) is int else list(value) if isinstance(value, (tuple, list)) else []
    found = found * 2 if len(found) == 1 else found
    return found if len(found) == 2 and all(type(each) is int for each in found) else None


def _batches(module: GraphModule, context: Context) -> tuple[Sequence[Any], ...]:
    """Return the inputs of the workload's real batches, by placeholder, where the program can be run on them here.

    A program that writes to its inputs or to its state has no layers, since it may write to their weights, too.
    """
    remote = any(is_call(node) or is_issue(node) for node in module.graph.nodes)
    if context.workload is None or remote:
        return ()
    known = context.workload.real_batches or context.workload.calibration
    bound = [_bound(module, each) for each in known[:MAX_CALIBRATION]]
    return tuple(each for each in bound if each is not None)


def _bound(module: GraphModule, batch: Batch) -> Sequence[Any] | None:
    if getattr(module.graph._codegen, "pytree_info", None) is not None:
        return None if batch.kwargs else module.graph.process_inputs(*batch.inputs)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    if any(str(node.target).startswith("*") for node in nodes):
        return None
    given = dict(zip((str(node.target) for node in nodes), batch.inputs, strict=False)) | dict(batch.kwargs)
    values = [given.get(str(node.target), node.args[0] if node.args else None) for node in nodes]
    return values if given.keys() <= {str(node.target) for node in nodes} else None


def calibrate(
    module: GraphModule, layers: Sequence[Layer], batches: Sequence[Sequence[Any]]
) -> tuple[list[Any], dict[Node, Range]]:
    """Run the program as it is; return its results, and the ranges of what the layers take."""
    run = _Observed(module, layers)
    results = [run.results_of(each) for each in batches]
    return results, run.ranges


class _Run(Interpreter):
    """Runs a program node by node, and leaves torch's generator as it was."""

    def results_of(self, values: Sequence[Any]) -> Any:
        with torch.random.fork_rng(devices=[]):
            return super().run(*values, enable_io_processing=False)


class _Observed(_Run):
    """Notes the ranges of what layers take, as it is when they take it: it may have been written to by then."""

    def __init__(self, module: GraphModule, layers: Sequence[Layer]) -> None:
        super().__init__(module)
        self._inputs = {each.node: each.input for each in layers}
        self.ranges = dict.fromkeys(self._inputs.values(), Range())

    def run_node(self, n: Node) -> Any:
        if (taken := self._inputs.get(n)) is not None:
            self.ranges[taken] = self.ranges[taken].with_values(self.env[taken])
        return super().run_node(n)


class _Replaced(_Run):
    """Computes some layers on int8 weights."""

    def __init__(self, module: GraphModule, layers: Sequence[Layer], ranges: Mapping[Node, Range]) -> None:
        super().__init__(module)
        self._layers, self._ranges = {each.node: each for each in layers}, ranges

    def run_node(self, n: Node) -> Any:
        layer = self._layers.get(n)
        return super().run_node(n) if layer is None else layer(self.env[layer.input], self._ranges[layer.input])


@dataclass(frozen=True, slots=True)
class _Error:
    """Measures how far the results are from the original's with some layers on int8 weights."""

    module: GraphModule
    batches: Sequence[Sequence[Any]]
    reference: Sequence[Any]
    ranges: Mapping[Node, Range]

    def of(self, layers: Sequence[Layer]) -> float:
        """Return the largest relative error of any result (see `relative_error`)."""
        run = _Replaced(self.module, layers, self.ranges)
        pairs = zip(self.batches, self.reference, strict=True)
        return max(largest_error(run.results_of(batch), expected) for batch, expected in pairs)


def _rewrite(module: GraphModule, layer: Layer, known: Range | None) -> None:
    """Let the layer's node compute it on int8 weights."""
    node, name = layer.node, layer.affine.weight.name
    held = [("int8", layer.weight), ("int8.scales", layer.scales), ("int8.bias", layer.bias)]
    weights = [
        None if value is None else read(module, hold(module, f"{name}.{end}", value), layer.sources, node)
        for end, value in held
    ]
    given, scale, zero_point = layer.input, None, 0
    if known is not None:
        scale, zero_point = known.scale, known.zero_point
        with module.graph.inserting_before(node):
            given = module.graph.call_function(_OPERATORS.quantize.default, (layer.input, scale, zero_point))
        given.meta.update(place_of(node))
    become(node, (layer.operator, (given, scale, zero_point, *weights, *layer.options, None, 0, False), {}))


_INT8 = frozenset({_OPERATORS.int8_linear.default, _OPERATORS.int8_conv2d.default})


def _chain(module: GraphModule) -> None:
    """Let layers apply the ReLU behind them, and hand integers to layers that take their results alone."""
    for node in list(module.graph.nodes):
        if node.target not in _INT8:
            continue
        behind = only_user(node)
        if behind is not None and is_relu(module, behind):
            node.args = (*node.args[:-1], True)
            behind.replace_all_uses_with(node)
            module.graph.erase_node(behind)
        taken = {user.args[1:] for user in node.users if user.target is _OPERATORS.quantize.default}
        if len(taken) == 1 and all(user.target is _OPERATORS.quantize.default for user in node.users):
            node.args = (*node.args[:-3], *taken.pop(), node.args[-1])
            for user in list(node.users):
                user.replace_all_uses_with(node)
                module.graph.erase_node(user)


def _restore_layout(module: GraphModule, layer: Layer) -> None:
    """Give a convolution's result, which is channels last, torch's default layout where the program may rely on it."""
    node, out_scale = layer.node, layer.node.args[-3]
    if node.target is not _OPERATORS.int8_conv2d.default or out_scale is not None or node.meta.get(CHANNELS_LAST):
        return
    with module.graph.inserting_after(node):
        plain = module.graph.call_method("contiguous", (node,))
    plain.meta.update(place_of(node))
    node.replace_all_uses_with(plain, delete_user_cb=lambda user: user is not plain)
