"""Run linear layers and convolutions on int8 weights.

The pass finds the layers, takes the ranges of their inputs from the workload's batches, leaves layers in float until
the results are within the bound, and replaces the others with the operators of `fxlib.runtime.int8`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.modules.conv import _ConvNd
from typing_extensions import override

from fxlib.analysis.effects.gradients import respects_no_grad
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.layers import LinearLayer, Steadiness, linear_layer_of, under_autocast
from fxlib.analysis.norms import scales_and_shifts
from fxlib.analysis.operators.arguments import arguments_of
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import forget_value, model_position, working_copy
from fxlib.passes.infra.folded_values import CHANNELS_LAST, FunctionCall, become, hold, read, sweep
from fxlib.passes.infra.introduced import Introduced
from fxlib.passes.local.quantize.levels import Levels, Link, Plan, Seen, ValueRange, pair_of
from fxlib.reasons import Declined, Reason
from fxlib.runtime import int8, is_call, is_issue
from fxlib.runtime.submodules import submodule
from fxlib.spec.inputs import Batch
from fxlib.spec.report import Sensitivity
from fxlib.spec.workload import MAX_CALIBRATION, LayerRange
from fxlib.utils.compare import largest_error

_OPERATORS = torch.ops.fxlib
_LEAST_VALUES = 100
"""Minimum number of observed values: the next value of the same distribution is outside their range with probability
2 in 101."""


@register_pass(
    "quantize",
    preserves="lossy",
    needs=frozenset({"weights", "eval_mode"}),
    introduces=Introduced(namespaces=frozenset({int8.NAMESPACE})) | Introduced.of("contiguous"),
    version="6",
)
class Quantize(GraphPass):
    """Run linear layers and two-dimensional convolutions on int8 weights and inputs, with sums in 32 bits.

    Weights have a scale for each output channel. The range of a layer's input is its range over the workload's real
    batches, if there are any and the program makes no remote calls, or the range in the workload (`Workload.ranges`);
    otherwise each forward uses the range of its own input. With a bound on the error (`Context.max_relative_error`) and
    batches to measure it on, the layers that change the results most on their own stay in float until the rest is
    within the bound. If ranges are known, values stay integers from one layer to the next (`Levels`).
    """

    least_weights: int = 4096
    """Minimum number of weights in a layer; smaller layers, and depthwise convolutions, stay in float unless they take
    levels or pass them on: alone they take too little time to save any."""
    trials: int = 64
    """Number of groups of layers whose share of the error is measured; in a small model each layer is a group."""

    def __post_init__(self) -> None:
        """Reject limits that nothing could meet."""
        self.require_at_least(least_weights=0, trials=0)

    @override
    @torch.no_grad()
    def run(self, module: GraphModule, context: Context) -> PassResult:
        found = _Search(module, context.get(Effects), self.least_weights)
        layers, small, declined = found.layers, found.small, found.declined
        if found.are_all_small:
            return PassResult(module, changes=0, declined=(*declined, *self._alone(layers)))
        levels = Levels(module, context.get(Effects), [each.linear for each in layers])
        batches, seen = _batches(module, context), None
        given = () if context.workload is None or batches else context.workload.ranges
        if batches:
            layers, seen = self._calibrated(found, levels, batches, context.max_relative_error, declined)
        elif given:
            layers, seen = self._with_given_ranges(found, levels, given, declined)
        plan = levels.plan([each.node for each in layers], small, seen)
        Rewriting(module, plan, layers, {node: node for node in module.graph.nodes}).run()
        sweep(module)
        declined += self._alone([each for each in layers if each.node not in plan.layers])
        measured = tuple(found.sensitivity)
        return PassResult(module, changes=len(plan.layers), declined=tuple(declined), sensitivity=measured)

    @torch.no_grad()
    def ranges(self, module: GraphModule, context: Context) -> tuple[LayerRange, ...]:
        """Return the ranges that a pass without the workload's batches needs to do the same; `module` stays unchanged.

        Returns:
            The ranges; none if there are no layers, or no batches that the program can run on here.
        """
        found, batches = _Search(module, context.get(Effects), self.least_weights), _batches(module, context)
        if found.are_all_small or not batches:
            return ()
        declined = list[Declined]()
        levels = Levels(module, context.get(Effects), [each.linear for each in found.layers])
        _, seen = self._calibrated(found, levels, batches, context.max_relative_error, declined)
        too_far = {each.node: each.detail for each in declined if each.reason is Reason.ERROR_BOUND}
        names = [(layer.input, name, too_far.get(layer.node.name, "")) for name, layer in _named(found.layers).items()]
        names += [(value, ((), index), "") for index, value in enumerate(_between(found.layers, levels))]
        return tuple(
            LayerRange(
                weights=weights,
                use=use,
                least=seen.ranges[value].least,
                most=seen.ranges[value].most,
                values=seen.ranges[value].values,
                too_far=why,
                shape=tuple(seen.shapes.get(value, ())),
            )
            for value, (weights, use), why in names
        )

    def _calibrated(
        self,
        found: _Search,
        levels: Levels,
        batches: Sequence[Sequence[Any]],
        bound: float | None,
        declined: list[Declined],
    ) -> tuple[list[Layer], Seen]:
        """Return the layers that can run on int8 weights according to the batches, and all layers' observations."""
        reference, seen = calibrate(found.module, levels, found.layers, batches)
        kept = self._with_known_range(found.layers, found.small, seen.ranges, declined)
        if bound is not None:
            measured = _Error(found.module, batches, reference, levels, found.small, seen)
            kept = self._within(measured, kept, bound, declined, found.sensitivity)
        return kept, seen

    def _with_given_ranges(
        self, found: _Search, levels: Levels, given: Sequence[LayerRange], declined: list[Declined]
    ) -> tuple[list[Layer], Seen]:
        """Return the same for ranges that were taken elsewhere; nothing is known about layers that they omit."""
        known = {(each.weights, each.use): each for each in given}
        seen, kept = Seen(), list[Layer]()
        for name, layer in _named(found.layers).items():
            each = known.get(name)
            seen.set_range(layer.input, each)
            if each is not None and each.too_far:
                declined.append(Declined(node=layer.node.name, reason=Reason.ERROR_BOUND, detail=each.too_far))
            else:
                kept.append(layer)
        for index, value in enumerate(_between(found.layers, levels)):
            seen.set_range(value, known.get(((), index)))
        return self._with_known_range(kept, found.small, seen.ranges, declined), seen

    def _alone(self, layers: Sequence[Layer]) -> list[Declined]:
        """Return why layers are declined that neither take levels nor pass them on."""
        large = [each.node for each in layers if each.linear.weight.tensor.numel() >= self.least_weights]
        return [Declined(node=node.name, reason=Reason.NOT_INT8) for node in large]

    def _with_known_range(
        self,
        layers: Sequence[Layer],
        small: Collection[Node],
        ranges: Mapping[Node, ValueRange],
        declined: list[Declined],
    ) -> list[Layer]:
        kept = list[Layer]()
        for layer in layers:
            known = ranges[layer.input]
            if not known.is_finite:
                why = Declined(node=layer.node.name, reason=Reason.CALIBRATION_NOT_FINITE)
            elif known.values < _LEAST_VALUES or known.least == known.most:
                found = f"{known.values} values" if known.values < _LEAST_VALUES else f"{known.values} zeros"
                why = Declined(node=layer.node.name, reason=Reason.CALIBRATION_TOO_SMALL, detail=found)
            else:
                kept.append(layer)
                continue
            if layer.node not in small:
                declined.append(why)
        return kept

    def _within(
        self,
        measured: _Error,
        layers: Sequence[Layer],
        bound: float,
        declined: list[Declined],
        sensitivity: list[Sensitivity],
    ) -> list[Layer]:
        """Return layers that together keep the results within a bound, preferring those with the least error alone."""
        if not layers or (error := measured.of(layers)) <= bound:
            sensitivity.extend([_sensitivity(layers, error, lossy=True)] if layers else [])
            return list(layers)
        beside = [each for each in layers if each.node in measured.small]
        layers = [each for each in layers if each.node not in measured.small]
        detail = f"{bound:.2g} is allowed for all, and layers that pay only between others go first"
        declined.extend(Declined(node=each.node.name, reason=Reason.ERROR_BOUND, detail=detail) for each in beside)
        if beside and (not layers or (error := measured.of(layers)) <= bound):
            sensitivity.extend([_sensitivity(layers, error, lossy=True)] if layers else [])
            return layers
        size = math.ceil(len(layers) / self.trials)
        groups = [layers[first : first + size] for first in range(0, len(layers), size)]
        alone = sorted(((measured.of(group), group) for group in groups), key=lambda each: each[0])
        fitting, least = 0, len(alone)
        while fitting < least - 1:  # the error grows with the layers, so find the longest prefix that fits
            middle = (fitting + least) // 2
            chosen = [layer for _, group in alone[:middle] for layer in group]
            fitting, least = (middle, least) if measured.of(chosen) <= bound else (fitting, middle)
        sensitivity.extend(
            _sensitivity(group, error, lossy=index < fitting) for index, (error, group) in enumerate(alone)
        )
        for error, group in alone[fitting:]:
            detail = f"{error:.2g} alone, and {bound:.2g} is allowed for all"
            declined.extend(Declined(node=each.node.name, reason=Reason.ERROR_BOUND, detail=detail) for each in group)
        kept = {layer.node for _, group in alone[:fitting] for layer in group}
        return [each for each in layers if each.node in kept]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """A layer that can run on int8 weights: the integers, and the scales that give their values."""

    linear: LinearLayer
    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    options: tuple[Any, ...]
    """Stride, padding, dilation and groups of a convolution."""

    @property
    def node(self) -> Node:
        """The node that calls the layer."""
        return self.linear.node

    @property
    def input(self) -> Node:
        """The layer's input."""
        return self.linear.input

    @property
    def sources(self) -> frozenset[str]:
        """The names of the weights that its integers come from."""
        bias = self.linear.bias
        return self.linear.weight.sources | (bias.sources if bias is not None else frozenset())

    @property
    def operator(self) -> Any:
        """The operator that computes the layer."""
        return (_OPERATORS.int8_linear if self.linear.kind == "linear" else _OPERATORS.int8_conv2d).default


def _sensitivity(layers: Sequence[Layer], error: float, *, lossy: bool) -> Sensitivity:
    return Sensitivity(nodes=tuple(each.node.name for each in layers), error=error, lossy=lossy)


def _named(layers: Sequence[Layer]) -> dict[tuple[tuple[str, ...], int], Layer]:
    """Return layers by the names of their weights and, if several have the same names, by their number."""
    uses, found = Counter[tuple[str, ...]](), dict[tuple[tuple[str, ...], int], Layer]()
    for layer in layers:
        weights = tuple(sorted(layer.sources))
        found[weights, uses[weights]] = layer
        uses[weights] += 1
    return found


def _between(layers: Sequence[Layer], levels: Levels) -> list[Node]:
    """Return the values, other than layers' inputs, whose range a plan needs, in order."""
    inputs = {each.input for each in layers}
    return [value for value in levels.watched() if value not in inputs]


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as integers, with a scale for each output channel, the first dimension."""
    flat = weight.reshape(weight.shape[0], -1).double()
    scales = flat.abs().amax(1) / int8.WEIGHT_LIMIT
    scales = torch.where(scales > 0.0, scales, torch.ones_like(scales)).float()
    integers = (flat / scales.double()[:, None]).round_().clamp_(-int8.WEIGHT_LIMIT, int8.WEIGHT_LIMIT)
    return integers.to(torch.int8).reshape(weight.shape).contiguous(), scales


class _Search:
    """Finds the layers of a program that can run on int8 weights."""

    def __init__(self, module: GraphModule, effects: Effects, least_weights: int) -> None:
        self.module, self._least = module, least_weights
        self._steadiness = Steadiness(module, effects)
        self._blocked = None if respects_no_grad(module) else Reason.MODE_BLOCKS
        self._autocast = set(under_autocast(module.graph.nodes))
        self.layers: list[Layer] = []
        self.small: set[Node] = set()
        """The layers among them that do not pay off on their own."""
        self.declined: list[Declined] = []
        self.sensitivity: list[Sensitivity] = []
        for node in module.graph.nodes:
            linear = linear_layer_of(module, node)
            if linear is not None:
                self._take(linear)

    @property
    def are_all_small(self) -> bool:
        """Whether no layer pays off on its own."""
        return self.small.issuperset(each.node for each in self.layers)

    def _take(self, linear: LinearLayer) -> None:
        tensors = [each.tensor for each in (linear.weight, linear.bias) if each is not None]
        few = linear.weight.tensor.numel() < self._least
        if few or (linear.kind == "convolution" and linear.weight.tensor.shape[1] == 1):
            self.small.add(linear.node)
        mode = Reason.AUTOCAST if linear.node in self._autocast else self._blocked
        reason = mode or self._misfit(linear, tensors) or self._steadiness.refusal(linear.node, tensors)
        options = None if reason else self._options(linear)
        if few and (reason or options is None):
            return
        if reason or options is None:
            self.declined.append(Declined(node=linear.node.name, reason=reason or Reason.NOT_INT8))
            return
        weight, scales = quantized(linear.weight.tensor)
        bias = None if linear.bias is None else linear.bias.tensor.detach().clone().contiguous()
        self.layers.append(Layer(linear=linear, weight=weight, scales=scales, bias=bias, options=options))

    def _misfit(self, linear: LinearLayer, tensors: Sequence[torch.Tensor]) -> Reason | None:
        if linear.kind == "linear":
            fits = linear.weight.tensor.dim() == 2  # F.linear takes a vector, too
        else:
            fits = linear.kind == "convolution" and linear.dimensions == 2
        plain = all(each.dtype is torch.float32 and each.device.type == "cpu" for each in tensors)
        if not fits or not plain:
            return Reason.NOT_INT8
        if any(map(torch.Tensor.is_inference, tensors)):
            return Reason.WEIGHT_UNCOUNTED
        return None if all(bool(each.isfinite().all()) for each in tensors) else Reason.NOT_FINITE

    def _options(self, linear: LinearLayer) -> tuple[Any, ...] | None:
        """Return stride, padding, dilation and groups; None if int8 convolutions do not support their form."""
        if linear.kind == "linear":
            return ()
        if linear.node.op == "call_module":
            layer = submodule(self.module, str(linear.node.target))
            given: Mapping[str, Any] = vars(layer)
            if isinstance(layer, _ConvNd) and layer.padding_mode != "zeros":
                return None
        else:
            given = arguments_of(linear.node)
        padding = 0 if (padding := given.get("padding", 0)) == "valid" else padding
        pairs = [pair_of(each) for each in (given.get("stride", 1), padding, given.get("dilation", 1))]
        return None if None in pairs else (*pairs, linear.groups)


def _batches(module: GraphModule, context: Context) -> tuple[Sequence[Any], ...]:
    """Return the inputs of the workload's real batches, by placeholder, if the program can run on them here.

    A program that writes to memory from outside does not run here: its submodules are the caller's own, and a norm in
    training mode or an embedding with `max_norm` would change them.
    """
    remote = any(is_call(node) or is_issue(node) for node in module.graph.nodes)
    if context.workload is None or remote or _writes_outside(module, context.get(Effects)):
        return ()
    known = context.workload.real_batches or context.workload.calibration
    bound = [_bound(module, each) for each in known[:MAX_CALIBRATION]]
    return tuple(each for each in bound if each is not None)


def _writes_outside(module: GraphModule, effects: Effects) -> bool:
    return not Steadiness(module, effects).written.isdisjoint(effects.aliases.outside())


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
    module: GraphModule, levels: Levels, layers: Sequence[Layer], batches: Sequence[Sequence[Any]]
) -> tuple[list[Any], Seen]:
    """Run the unchanged program; return its results, and the observations of its values."""
    run = _Observed(module, levels, layers)
    results = [run.results_of(each) for each in batches]
    return results, run.seen


class _Run(Interpreter):
    """Runs a program node by node, and restores torch's generator."""

    def results_of(self, values: Sequence[Any]) -> Any:
        with torch.random.fork_rng(devices=[]):
            return super().run(*values, enable_io_processing=False)


class _Observed(_Run):
    """Records values; it records layers' inputs at the time of use, since they may be overwritten later."""

    def __init__(self, module: GraphModule, levels: Levels, layers: Sequence[Layer]) -> None:
        super().__init__(module)
        inputs = {each.node: each.input for each in layers}
        self._written = {node: taken for node, taken in inputs.items() if levels.is_written(taken)}
        self._watched = set(inputs.values()).union(levels.watched()).difference(self._written.values())
        self.seen = Seen()

    def run_node(self, n: Node) -> Any:
        if (taken := self._written.get(n)) is not None:
            self.seen.note(taken, self.env[taken])
        value = super().run_node(n)
        if n in self._watched:
            self.seen.note(n, value)
        return value


@dataclass(frozen=True, slots=True)
class _Error:
    """Measures the error of the results against the original's with some layers on int8 weights."""

    module: GraphModule
    batches: Sequence[Sequence[Any]]
    reference: Sequence[Any]
    levels: Levels
    small: Collection[Node]
    seen: Seen

    def of(self, layers: Sequence[Layer]) -> float:
        """Return the largest relative error of any result (see `relative_error`)."""
        working = working_copy(self.module)
        plan = self.levels.plan([each.node for each in layers], self.small, self.seen)
        at = dict(zip(self.module.graph.nodes, working.graph.nodes, strict=True))
        Rewriting(working, plan, layers, at).run()
        run = _Run(working)
        pairs = zip(self.batches, self.reference, strict=True)
        return max(largest_error(run.results_of(batch), expected) for batch, expected in pairs)


class Rewriting:
    """Applies a plan to a program."""

    def __init__(self, module: GraphModule, plan: Plan, layers: Sequence[Layer], at: Mapping[Node, Node]) -> None:
        """Prepare the rewrite.

        Args:
            module: the program, or a copy of it.
            plan: the plan for it.
            layers: at least the plan's layers.
            at: the module's nodes, by the nodes in the plan and the layers.
        """
        self._module, self._graph, self._plan, self._at = module, module.graph, plan, dict(at)
        self._layers = {each.node: each for each in layers}
        self._rounded: dict[Node, Node] = {}
        """Levels of values that are not held, by the plan's nodes."""

    def run(self) -> None:
        """Rewrite the program."""
        write: dict[str, Callable[[Link, Node], FunctionCall | None]] = {
            "layer": self._layer,
            "sum": self._sum,
            "norm": self._norm,
            "pool": self._pool,
            "average": self._average,
            "move": self._move,
            "join": self._join,
        }
        for work in self._plan.works:
            node = self._at[work.node]
            if (call := write[work.kind](work, node)) is not None:
                become(node, call)
            self._absorb(work, node)
            if work.end in self._plan.held:
                self._hand_on(work, node)
            elif node.target is _OPERATORS.int8_conv2d.default and not node.meta.get(CHANNELS_LAST):
                self._at[work.end] = self._behind(node, self._graph.call_method("contiguous", (node,)), node.users)

    def _layer(self, work: Link, node: Node) -> FunctionCall:
        layer = self._layers[work.node]
        given = self._levels_of(layer.input, node) if self._plan.ranges else (self._at[layer.input], None, 0)
        out = self._point(work.end) if work.end in self._plan.held else (None, 0)
        return layer.operator, (*given, *self._weights(layer, node), *layer.options, *out, work.activation), {}

    def _sum(self, work: Link, node: Node) -> FunctionCall:
        assert work.layer is not None  # noqa: S101 - a sum has one
        layer = self._layers[work.layer]
        given = self._levels_of(layer.input, self._at[work.layer])
        rest = (*self._weights(layer, node), *layer.options, *self._levels_of(work.takes[0], node))
        relu, over = work.activation == "relu", work.node in self._plan.overwriting
        operator = (_OPERATORS.int8_conv2d_add_over if over else _OPERATORS.int8_conv2d_add).default
        return operator, (*given, *rest, *self._point(work.end), relu), {}

    def _norm(self, work: Link, node: Node) -> FunctionCall:
        norm = work.norm
        assert norm is not None  # noqa: S101 - a norm has one
        sources = frozenset[str]().union(*(each.sources for each in norm.weights))
        given, weights = self._levels_of(work.takes[0], node), list[Node]()
        for end, value in zip(("scale", "shift"), scales_and_shifts([norm])[norm], strict=True):
            name = hold(self._module, f"{norm.mean.name.removeprefix('_')}.{end}", value.float().contiguous())
            weights.append(read(self._module, name, sources, node))
        return _OPERATORS.int8_norm.default, (*given, *weights, *self._point(work.end)), {}

    def _pool(self, work: Link, node: Node) -> FunctionCall:
        return _OPERATORS.int8_max_pool2d.default, (self._levels_of(work.takes[0], node)[0], *work.options), {}

    def _average(self, work: Link, node: Node) -> FunctionCall:
        return _OPERATORS.int8_avg_pool2d.default, (self._levels_of(work.takes[0], node)[0], *work.options), {}

    def _move(self, work: Link, node: Node) -> None:
        (taken,) = work.takes
        levels = self._levels_of(taken, node)[0]
        if not levels.meta.get(CHANNELS_LAST):
            with self._graph.inserting_before(node):
                plain = self._graph.call_method("contiguous", (levels,))
            plain.meta.update(model_position(node))
            node.replace_input_with(levels, plain)

    def _join(self, work: Link, node: Node) -> None:
        for taken in work.takes:
            node.replace_input_with(self._at[taken], self._levels_of(taken, node)[0])

    def _point(self, value: Node) -> tuple[float, int]:
        """Return the scale of a value, and the level of its zero."""
        known = self._plan.ranges[value]
        return known.scale, known.zero_point

    def _levels_of(self, value: Node, user: Node) -> tuple[Node, float, int]:
        """Return the levels of a value just before the node that takes them, and their scale and zero."""
        point, levels = self._point(value), self._at[value]
        if value in self._rounded:
            levels = self._rounded[value]
        elif value not in self._plan.held:
            with self._graph.inserting_before(user):
                levels = self._graph.call_function(_OPERATORS.quantize.default, (levels, *point))
            levels.meta.update(model_position(user))
            if value in self._plan.steady:
                self._rounded[value] = levels
        return levels, *point

    def _weights(self, layer: Layer, node: Node) -> list[Node | None]:
        name = layer.linear.weight.name
        held = [("int8", layer.weight), ("int8.scales", layer.scales), ("int8.bias", layer.bias)]
        return [
            None
            if value is None
            else read(self._module, hold(self._module, f"{name}.{end}", value), layer.sources, node)
            for end, value in held
        ]

    def _absorb(self, work: Link, node: Node) -> None:
        """Let the work's node replace all the work that it includes."""
        self._at[work.end].replace_all_uses_with(node)
        beside = [work.layer, work.norm.call if work.norm is not None else None]
        for each in (*reversed(work.inner), *beside):
            if each is not None and self._at[each] is not node:
                self._graph.erase_node(self._at[each])
        self._at[work.end] = node

    def _hand_on(self, work: Link, node: Node) -> None:
        """Give levels to the users that take them, and the numbers they stand for to all others."""
        forget_value(node)
        takers = {self._at[each] for each in self._plan.takers[work.end]}
        others = [user for user in node.users if user not in takers]
        if not others:
            return
        point = self._point(work.end)
        plain = self._behind(node, self._graph.call_function(_OPERATORS.dequantize.default, (node, *point)), others)
        if work.kind != "move" and not node.meta.get(CHANNELS_LAST):
            self._behind(plain, self._graph.call_method("contiguous", (plain,)), others)

    def _behind(self, node: Node, made: Node, users: Iterable[Node]) -> Node:
        """Insert `made` directly after the value it was made from, replacing that for some users; return it."""
        for user in list(users):
            if user is not made:
                user.replace_input_with(node, made)
        node.append(made)
        made.meta.update(model_position(node))
        return made
