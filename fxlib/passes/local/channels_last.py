"""Run convolutional networks channels last, if that pays.

The pass first finds regions: a region grows from two-dimensional convolutions through operators that accept any layout
and preserve it. All other users of a region's values, and the module's caller, get them in their original layout. The
pass then converts the regions in which enough convolutions gain.

An operator that joins values of several memory orders gives its result the first order that decides, so a convolution
that goes channels last would change the strides of what it is joined with. If all values are in the default order, so
is the result.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from typing_extensions import override

from fxlib.analysis.effects.gradients import respects_no_grad
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Behaviour, Part
from fxlib.analysis.effects.resources import Storage
from fxlib.analysis.layers import InputRank, LinearLayer, Rank, Steadiness, linear_layer_of, ranks_of
from fxlib.analysis.operators import operator_tables as words
from fxlib.analysis.operators.arguments import replace_arguments
from fxlib.analysis.operators.schemas import OperatorFacts, attribute
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import forget_value
from fxlib.passes.infra.folded_values import (
    CHANNELS_LAST,
    LAYERS_AS_FUNCTIONS,
    as_function,
    become,
    hold,
    order_and_source,
    read,
    sweep,
)
from fxlib.passes.infra.introduced import Introduced
from fxlib.reasons import Declined, Reason
from fxlib.runtime.guards.folded_weights import RANK
from fxlib.runtime.submodules import submodule


@register_pass(
    "channels_last",
    preserves="tolerance",
    needs=frozenset({"weights", "eval_mode"}),
    introduces=LAYERS_AS_FUNCTIONS | Introduced.of("clone", "contiguous"),
    version="2",
)
class ChannelsLast(GraphPass):
    """Put two-dimensional convolutions, and the operators between them, into the layout that their kernels prefer.

    Weights are converted once. Activations change their layout where they enter and leave a region of such work, and
    the module returns tensors with the same strides as before (for inputs in torch's default layout). A region in which
    too few convolutions gain from each change is left alone.
    """

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        found = regions_of(module)
        declined = list(found.declined)
        held: dict[object, str] = {}
        changes = 0
        for region in found.regions:
            if not region.gains:
                detail = f"{region.changes} changes for {len(region.convolutions)} convolutions"
                names = (each.node.name for each in region.convolutions)
                declined.extend(Declined(node=name, reason=Reason.LAYOUT_MIXED, detail=detail) for name in names)
                continue
            _convert(module, region, held)
            changes += len(region.convolutions)
        sweep(module)
        return PassResult(module, changes=changes, declined=tuple(declined))


def _convert(module: GraphModule, region: Region, held: dict[object, str]) -> None:
    for value, users in region.exits.items():
        for user in users:
            user.replace_input_with(value, _plain(module.graph, value, user))
    for each in region.nodes:
        forget_value(each)
        each.meta[CHANNELS_LAST] = True
    for layer in region.entries:
        layer.node.replace_input_with(layer.input, _last(module.graph, layer.input, layer.node))
    for layer in region.convolutions:
        _lay_out(module, layer, held)
    for placeholder, rank in region.ranks.items():
        placeholder.meta[RANK] = rank


def _plain(graph: Graph, value: Node, user: Node) -> Node:
    """Insert the conversion to torch's default layout; the caller gets exactly these strides, always as a copy."""
    with graph.inserting_before(user):
        if user.op == "output":
            node = graph.call_method("clone", (value,), {"memory_format": torch.contiguous_format})
        else:
            node = graph.call_method("contiguous", (value,))
    node.meta = order_and_source(value)
    return node


def _last(graph: Graph, value: Node, user: Node) -> Node:
    with graph.inserting_before(user):
        node = graph.call_method("contiguous", (value,), {"memory_format": torch.channels_last})
    node.meta = order_and_source(user)
    return node


def _lay_out(module: GraphModule, layer: LinearLayer, held: dict[object, str]) -> None:
    """Give the convolution a weight that is channels last."""
    weight = layer.weight
    if weight.tensor.is_contiguous(memory_format=torch.channels_last):
        return
    key = id(weight.tensor)
    if key not in held:
        laid = weight.tensor.detach().contiguous(memory_format=torch.channels_last)
        held[key] = hold(module, f"{weight.name.removeprefix('_')}.channels_last", laid)
    value = read(module, held[key], weight.sources, layer.node)
    if layer.node.op == "call_module":
        bias = None
        if layer.bias is not None:
            with module.graph.inserting_before(layer.node):
                bias = module.graph.create_node("get_attr", layer.bias.name)
        become(layer.node, as_function(module, layer, value, bias))
    else:
        replace_arguments(layer.node, weight=value)


_ASKING = words.QUERIES - {"stride"} | {"getattr", "sym_size"}
"""Operators that ask a tensor for anything but its strides and its memory."""
_FLAGS = frozenset({"memory_format", "out", "return_indices"})
_PLAIN_POOL = 6
"""Number of arguments of a pooling operator that does not return indices."""
_PER_CHANGE = 2
"""Number of convolutions that must gain for each tensor whose layout changes; a change takes about as long as one
gains."""
_TO_ONE_PIXEL = frozenset({"adaptive_avg_pool2d", "mean", "AdaptiveAvgPool2d"})
"""Operators whose results are small, and usually in both layouts at once."""


@dataclass(slots=True, kw_only=True, eq=False)
class Region:
    """Values that are channels last, except those that the program itself gave another layout."""

    nodes: list[Node] = field(default_factory=list)
    convolutions: list[LinearLayer] = field(default_factory=list)
    entries: list[LinearLayer] = field(default_factory=list)
    """The convolutions of the region whose input comes from outside."""
    exits: dict[Node, list[Node]] = field(default_factory=dict)
    """Values of the region, and their users outside."""
    large_exits: int = 0
    """Number of these values that are not small."""
    ranks: dict[Node, int] = field(default_factory=dict)
    """Ranks of the program's inputs that the region relies on."""

    @property
    def changes(self) -> int:
        """Number of tensors that are not small and change their layout at the borders."""
        return len({each.input for each in self.entries}) + self.large_exits

    @property
    def gains(self) -> bool:
        """Whether enough convolutions gain to pay for the changes of layout at the borders."""
        return len(self.convolutions) >= _PER_CHANGE * self.changes

    def absorb(self, other: Region) -> None:
        """Merge another region into this one."""
        self.nodes += other.nodes
        self.convolutions += other.convolutions
        self.entries += other.entries
        self.ranks |= other.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """The regions of a program, and the convolutions that belong to none, with the reason."""

    regions: list[Region]
    declined: list[Declined]


def regions_of(module: GraphModule) -> Regions:
    """Find the regions, in time proportional to nodes and edges."""
    growth = _Growth(module, Effects.of(module))
    growth.grow()
    return Regions(regions=growth.bounded(), declined=growth.declined)


class _Growth:
    """One walk over the program, in which each node joins the regions of its inputs."""

    def __init__(self, module: GraphModule, effects: Effects) -> None:
        self._module, self._effects = module, effects
        self._steadiness = Steadiness(module, effects)
        self._ranks = ranks_of(module, effects)
        self._aliased = _aliased(effects)
        self._in_default_order = in_default_order(module, effects)
        self._blocked = None if respects_no_grad(module) else Reason.MODE_BLOCKS
        self._region_of: dict[Node, Region] = {}
        self._joined: dict[Region, Region] = {}
        self.declined: list[Declined] = []

    def grow(self) -> None:
        for node in self._effects.nodes:
            layer = linear_layer_of(self._module, node)
            if layer is not None and layer.dimensions == 2:
                self._plant(layer)
            elif self._takes_any_layout(node):
                inside = [self._region_of[value] for value in node.all_input_nodes if value in self._region_of]
                if inside:
                    self._enter(node, inside)

    def bounded(self) -> list[Region]:
        """Return the regions with their exits, once they have grown."""
        regions = list(dict.fromkeys(self._root(each) for each in self._region_of.values()))
        for node in self._effects.nodes:
            if node in self._region_of or self._only_asks(node):
                continue
            for value in node.all_input_nodes:
                if value in self._region_of:
                    region = self._root(self._region_of[value])
                    region.large_exits += value not in region.exits and self._name(value) not in _TO_ONE_PIXEL
                    region.exits.setdefault(value, []).append(node)
        return regions

    def _plant(self, layer: LinearLayer) -> None:
        refusal = self._refusal(layer)
        if refusal is not None:
            self.declined.append(Declined(node=layer.node.name, reason=refusal))
            return
        source = self._region_of.get(layer.input)
        own = Region(convolutions=[layer], entries=[] if source is not None else [layer])
        rank = self._ranks.get(layer.input)
        if source is None and isinstance(rank, InputRank):
            own.ranks[rank.input] = layer.rank
        self._enter(layer.node, [own] if source is None else [source, own])

    def _refusal(self, layer: LinearLayer) -> Reason | None:
        tensors = [each.tensor for each in (layer.weight, layer.bias) if each is not None]
        if self._blocked is not None:
            return self._blocked
        if any(each.is_inference() for each in tensors):
            return Reason.WEIGHT_UNCOUNTED
        if self._effects.aliases.of(layer.node) in self._aliased:
            return Reason.VALUE_WRITTEN
        if layer.node not in self._in_default_order:
            return Reason.LAYOUT_OTHER
        if layer.input not in self._region_of and not _is_batch(self._ranks.get(layer.input), layer.rank):
            return Reason.RANK_UNKNOWN
        return self._steadiness.refusal(layer.node, tensors)

    def _enter(self, node: Node, regions: list[Region]) -> None:
        roots = dict.fromkeys(map(self._root, regions))
        first = max(roots, key=lambda each: len(each.nodes))
        for other in roots:
            if other is not first:
                self._joined[other] = first
                first.absorb(other)
        first.nodes.append(node)
        self._region_of[node] = first

    def _root(self, region: Region) -> Region:
        while region in self._joined:
            region = self._joined[region]
        return region

    def _takes_any_layout(self, node: Node) -> bool:
        operator = self._effects.behaviours[self._effects.index[node]].operator
        if operator is None or node not in self._in_default_order:
            return False
        if self._effects.aliases.of(node) in self._aliased:
            return False
        if node.op == "call_module":
            return _hands_layout_on(submodule(self._module, str(node.target)))
        asks_more = any(node.kwargs.get(flag) not in (None, False) for flag in _FLAGS)
        returns_indices = operator.name == "max_pool2d" and len(node.args) > _PLAIN_POOL
        return operator.name in words.ANY_LAYOUT and not asks_more and not returns_indices

    def _only_asks(self, node: Node) -> bool:
        operator = self._effects.behaviours[self._effects.index[node]].operator
        return operator is not None and operator.name in _ASKING and not operator.shares

    def _name(self, node: Node) -> str:
        operator = self._effects.behaviours[self._effects.index[node]].operator
        return "" if operator is None else operator.name


def _is_batch(rank: Rank | None, expected: int) -> bool:
    if isinstance(rank, InputRank):
        return rank.least <= expected == rank.input.meta.get(RANK, expected)
    return rank == expected


def _hands_layout_on(module: nn.Module) -> bool:
    known = type(module).__module__.startswith(words.ANY_LAYOUT_MODULES) and not isinstance(
        module, nn.MultiheadAttention
    )
    return known and not getattr(module, "return_indices", False)


def _aliased(effects: Effects) -> set[int]:
    """Return the alias classes that no copy in another layout may replace, since writes to them must stay visible.

    Memory in these classes is written by an operator that does not accept any layout, is written after a view of it was
    taken, is passed to code that may do anything, or leaves the module under two names.
    """
    found: set[int] = set()
    viewed: set[int] = set()
    for node, does, behaviour in zip(effects.nodes, effects.per_node, effects.behaviours, strict=True):
        classes = [effects.aliases.of(value) for value in node.all_input_nodes]
        operator = behaviour.operator
        plain = operator is not None and _takes_its_argument_as_it_is(operator)
        written = {each.alias_class for each in does.writes if isinstance(each, Storage)}
        found |= written & viewed if plain else written
        if does.part is Part.FENCE:
            found.update(classes)
        elif does.part is Part.OUTPUT:
            found.update(each for each, count in Counter(classes).items() if count > 1)
        elif operator is not None and operator.shares and not plain:
            viewed.update(classes)
    return found


def _takes_its_argument_as_it_is(operator: OperatorFacts) -> bool:
    if operator.name in words.ANY_LAYOUT:
        return True
    kind = getattr(nn, operator.name, None)
    return isinstance(kind, type) and kind.__module__.startswith(words.ANY_LAYOUT_MODULES)


_LAYOUT_PRESERVING = words.ANY_LAYOUT | words.in_all_forms(
    """
    log layer_norm group_norm softmax stack sum amax linear view reshape flatten getitem chunk split narrow slice
    unsqueeze clone detach float double half bfloat16 zeros_like ones_like embedding to pixel_shuffle pixel_unshuffle
    size dim numel floordiv mod int
    """
)
_LAYOUT_PRESERVING_MODULES = (
    *words.ANY_LAYOUT_MODULES,
    *(f"torch.nn.modules.{name}" for name in ("flatten", "linear", "normalization", "sparse")),
)
_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim"})


def in_default_order(module: GraphModule, effects: Effects) -> set[Node]:
    """Return the nodes whose values are in the default order, as far as is known, in one pass over the program."""
    found: set[Node] = set()
    for node, behaviour in zip(effects.nodes, effects.behaviours, strict=True):
        keeps = _keeps_default_order(module, node, behaviour) and found.issuperset(node.all_input_nodes)
        if keeps or _is_made_contiguous(node):
            found.add(node)
    return found


def _keeps_default_order(module: GraphModule, node: Node, behaviour: Behaviour) -> bool:
    """Return whether a node's value is in the default order if its inputs are."""
    if behaviour.part is Part.INPUT:
        return True
    if behaviour.part is Part.STATE:
        value = attribute(module, str(node.target))
        return not isinstance(value, torch.Tensor) or _is_contiguous(value)
    if behaviour.part is not Part.LOCAL or behaviour.operator is None:
        return False
    if node.op == "call_module":
        called = submodule(module, str(node.target))
        known = type(called).__module__.startswith(_LAYOUT_PRESERVING_MODULES) and not isinstance(
            called, nn.MultiheadAttention
        )
        return known and all(map(_is_contiguous, called.parameters()))
    return _keeps_order(node, behaviour.operator.name)


def _is_contiguous(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and value.is_contiguous()


def _is_made_contiguous(node: Node) -> bool:
    return node.op == "call_method" and node.target == "contiguous" and len(node.args) == 1 and not node.kwargs


def _keeps_order(node: Node, name: str) -> bool:
    arguments = (*node.args, *node.kwargs.values())
    if any(isinstance(each, torch.memory_format) for each in arguments):
        return False
    if name == "getattr":
        return node.args[1] in _ATTRIBUTES
    return name in _LAYOUT_PRESERVING
