"""Plan which values of a program stay integers from one int8 layer to the next.

Between two layers, a value need not become float32 and be rounded again. A link is a piece of work that takes and gives
integer levels: a layer with the activation after it, a convolution with the value added to it, a norm, a pooling, or an
operator that only moves values. The value of a link is held in levels if a layer, or a link whose own result is held,
takes it, or if means are all that is made of it, which evens the rounding out; all other users get the numbers that its
levels stand for. Values that a link leaves unchanged share one range; for the sake of means, none shares a far wider
one, in which it would have few levels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.resources import Storage
from fxlib.analysis.layers import LinearLayer, Steadiness, activation_of, only_user
from fxlib.analysis.norms import Norm, asks_only, counts_updates, norm_of
from fxlib.runtime import int8
from fxlib.runtime.submodules import submodule
from fxlib.spec.workload import LayerRange

_MOVES: Final = frozenset(
    {
        *("flatten", "Flatten", "reshape", "view", "squeeze", "unsqueeze", "permute", "transpose", "contiguous"),
        *("Identity", "clone", "pixel_shuffle", "PixelShuffle"),
    }
)
"""Operators that leave the values of their one tensor unchanged."""
_JOINS: Final = frozenset({"cat", "concat", "concatenate"})
_SUMS: Final = frozenset({"add", "add_", "iadd"})
_POOLS: Final = frozenset({"max_pool2d", "MaxPool2d"})
_AVERAGES: Final = frozenset({"avg_pool2d", "AvgPool2d"})
_POOLED: Final = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
"""Arguments of a pooling operator after its input."""
_AVERAGED: Final = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
"""Arguments of an average pooling after its input."""
_FEW: Final = 9
"""Largest number of values in a window whose mean is held in levels of the same range: that of more is too coarse."""
_MEANS: Final = _AVERAGES | {"adaptive_avg_pool2d", "AdaptiveAvgPool2d", "mean"}
"""Operators whose results are means of values."""
_KEEP_RANGE: Final = frozenset({"pool", "average", "move", "join"})
"""The kinds of links whose result shares the range of what they take."""
_WIDER: Final = 4.0
"""Largest factor by which a range that a value shares for the sake of means may be wider than its own: beyond it, most
of its levels are lost."""
_IMAGES: Final = 4
"""Number of dimensions of a batch of images."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The range of a tensor's values, which always includes zero."""

    least: float = 0.0
    most: float = 0.0
    values: int = 0
    """Number of values observed."""

    @property
    def is_finite(self) -> bool:
        """Whether no value was infinite or NaN."""
        return math.isfinite(self.least) and math.isfinite(self.most)

    @property
    def scale(self) -> float:
        """The distance between two neighbouring levels."""
        spread = (self.most - self.least) / int8.LARGEST
        return spread if spread > 0.0 and math.isfinite(1.0 / spread) else 1.0

    @property
    def zero_point(self) -> int:
        """The level of zero, which is represented exactly."""
        return round(-self.least / self.scale)

    def with_values(self, value: Any) -> ValueRange:
        """Return the range extended to a tensor's values; it is not finite for anything but a float32 tensor."""
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return ValueRange(-math.inf, math.inf)
        if not value.numel():
            return self
        least, most = (float(each) for each in torch.aminmax(value))
        if not (math.isfinite(least) and math.isfinite(most)):
            return ValueRange(-math.inf, math.inf)
        return self.joined(ValueRange(least, most, value.numel()))

    def joined(self, other: ValueRange) -> ValueRange:
        """Return the range that covers both ranges."""
        return ValueRange(min(self.least, other.least), max(self.most, other.most), self.values + other.values)


@dataclass(frozen=True, slots=True)
class Seen:
    """The observations of calibration about a program's values."""

    ranges: dict[Node, ValueRange] = field(default_factory=dict)
    shapes: dict[Node, torch.Size] = field(default_factory=dict)

    def set_range(self, node: Node, known: LayerRange | None) -> None:
        """Set a node's range from an observation made elsewhere; None if there is none."""
        self.ranges[node] = ValueRange() if known is None else ValueRange(known.least, known.most, known.values)
        if known is not None and known.shape:
            self.shapes[node] = torch.Size(known.shape)

    def note(self, node: Node, value: Any) -> None:
        """Record a value of a node."""
        self.ranges[node] = self.ranges.get(node, ValueRange()).with_values(value)
        if isinstance(value, torch.Tensor):
            self.shapes[node] = value.shape


Kind = Literal["layer", "sum", "norm", "pool", "average", "move", "join"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Link:
    """A piece of work that can take and give levels."""

    kind: Kind
    node: Node
    """The node where the work is done."""
    end: Node
    """The node whose value the link gives: the last of the later nodes that the link includes."""
    takes: tuple[Node, ...]
    """The values that the link takes; for a sum, the other summand."""
    inner: tuple[Node, ...] = ()
    """The later nodes that the link includes, in order."""
    activation: str = "none"
    layer: Node | None = None
    """The convolution whose result a sum takes."""
    norm: Norm | None = None
    options: tuple[Any, ...] = ()
    """The options of a pooling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan for a program."""

    works: Sequence[Link]
    """Layers, and other links that give levels, in program order; a sum also stands for its layer."""
    layers: AbstractSet[Node]
    """All layers on int8 weights."""
    held: AbstractSet[Node]
    """Values that are held in levels."""
    takers: Mapping[Node, Collection[Node]]
    """The users that take the levels of each held value."""
    ranges: Mapping[Node, ValueRange]
    """Ranges of the values that are levels or become levels; empty without batches."""
    steady: AbstractSet[Node]
    """Values that are the same for all their users."""
    overwriting: AbstractSet[Node]
    """Positions of the sums whose other summand has no later use."""


class Levels:
    """Makes plans for one program, for different sets of its layers on int8 weights."""

    def __init__(self, module: GraphModule, effects: Effects, linears: Iterable[LinearLayer]) -> None:
        """Inspect the program; `linears` are all layers that may be on int8 weights."""
        self._module, self._effects = module, effects
        self._steadiness = Steadiness(module, effects)
        operators = [behaviour.operator for behaviour in effects.behaviours]
        self._names = {
            node: "" if each is None else each.name for node, each in zip(effects.nodes, operators, strict=True)
        }
        self._layers = {each.node: self._layer(each) for each in linears}
        self._images = {each.node for each in linears if each.kind == "convolution"}
        self._norms = {node: norm for node in effects.nodes if (norm := self._norm(node)) is not None}
        self._written = self._written_classes()

    def watched(self) -> list[Node]:
        """Return all values whose range a plan needs, in program order."""
        found = self._links(self._layers, None).values()
        values = {value for link in found for value in (link.end, link.node, *link.takes)}
        return sorted(values, key=self._effects.index.__getitem__)

    def is_written(self, node: Node) -> bool:
        """Return whether anything other than links writes to a value."""
        return self._effects.aliases.of(node) in self._written

    def plan(self, layers: Iterable[Node], small: Collection[Node], seen: Seen | None) -> Plan:
        """Return the plan for the program.

        Args:
            layers: the layers on int8 weights.
            small: the layers among them that stay in float unless they take levels or pass them on.
            seen: the observations of calibration; None: no value is held.
        """
        chosen = set(layers)
        while True:
            plan = self._plan(chosen, seen)
            joined = {link.layer for link in plan.works}
            taken = {value for value, users in plan.takers.items() if not all(map(_asks_for_sizes, users))}
            left = {
                node
                for node in chosen.intersection(small)
                if node not in joined and taken.isdisjoint((*self._layers[node].takes, self._layers[node].end))
            }
            left = chosen if chosen <= set(small) else left
            if not left:
                return plan
            chosen = chosen - left

    def _plan(self, layers: AbstractSet[Node], seen: Seen | None) -> Plan:
        links = {} if seen is None else self._links(layers, seen)
        own: Mapping[Node, ValueRange] = {} if seen is None else seen.ranges
        inputs = {self._layers[node].takes[0] for node in layers}
        between = [link for link in links.values() if link.kind != "layer"]
        held = _held(between, links, inputs)
        coarse = _coarse(between, held, own)
        averaged = {value for value in links if value not in coarse and self._is_averaged(value)}
        held = _held(between, links, inputs | averaged)
        works = [link for link in between if link.end in held]
        ranges = _shared(works, own)
        joined = {link.layer for link in works}
        works += [self._layers[node] for node in layers if node not in joined]
        takers: dict[Node, set[Node]] = {
            value: {user for user in value.users if _asks_for_sizes(user)} for value in held
        }
        values = inputs.union(held)
        for link in (*works, *(self._layers[node] for node in joined if node is not None)):
            for value in link.takes:
                takers.get(value, set()).add(link.node)
                values.add(value)
        return Plan(
            works=sorted(works, key=lambda link: self._effects.index[link.node]),
            layers=layers,
            held=held,
            takers=takers,
            ranges=ranges,
            steady={value for value in values if not self.is_written(value)},
            overwriting={link.node for link in works if link.kind == "sum" and self._is_last(link, works, takers)},
        )

    def _is_last(self, link: Link, works: Sequence[Link], takers: Mapping[Node, Collection[Node]]) -> bool:
        """Return whether a sum's summand in levels is a tensor of its own whose other users all come before."""
        (other,) = link.takes
        done = {each.layer: each.node for each in works if each.layer is not None}
        moves = {node for each in works if each.kind == "move" for node in (each.node, each.end)}
        users = [done.get(user, user) for user in takers[other] if user is not link.node and not _asks_for_sizes(user)]
        before = all(self._effects.index[user] < self._effects.index[link.node] for user in users)
        return before and moves.isdisjoint((other, *users))

    def _links(self, layers: Collection[Node], seen: Seen | None) -> dict[Node, Link]:
        """Return the links by the values that they give, in program order."""
        found: dict[Node, Link] = {}
        for node in self._effects.nodes:
            link = self._layers[node] if node in layers else self._link(node, found, seen)
            if link is not None and self._is_sound(link, seen):
                found[link.end] = link
        return found

    def _is_sound(self, link: Link, seen: Seen | None) -> bool:
        """Return whether the link's values have ranges, and do not change later."""
        values = (link.end,) if link.kind == "layer" else (link.end, *link.takes)
        if any(map(self.is_written, values)):
            return False
        ranges = [] if seen is None else [seen.ranges.get(each, ValueRange()) for each in values]
        return all(each.is_finite and each.least < each.most for each in ranges)

    def _layer(self, linear: LinearLayer) -> Link:
        """Return a layer with the activation after it."""
        node, kind = linear.node, "linear" if linear.kind == "linear" else "convolution"
        inner, activation = self._gated(node), "silu"
        behind = only_user(node)
        if behind is not None and (found := activation_of(self._module, behind)) in int8.ACTIVATIONS[kind]:
            inner, activation = (behind,), str(found)
        plain = Link(kind="layer", node=node, end=node, takes=(linear.input,))
        return replace(plain, end=inner[-1], inner=inner, activation=activation) if inner else plain

    def _gated(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes of `x * sigmoid(x)`, as some programs write SiLU, if nothing else uses x."""
        for gate in node.users:
            product = only_user(gate)
            if (
                product is not None
                and node.users.keys() == {gate, product}
                and self._names[gate] in ("sigmoid", "Sigmoid")
                and gate.all_input_nodes == [node]
                and self._names[product] == "mul"
                and set(product.args) == {node, gate}
                and not product.kwargs
            ):
                return gate, product
        return ()

    def _link(self, node: Node, found: Mapping[Node, Link], seen: Seen | None) -> Link | None:
        name, values = self._names[node], tuple(node.all_input_nodes)
        norm = self._norms.get(node)
        if norm is not None:
            fits = norm.input in found and (seen is None or len(seen.shapes.get(norm.input, ())) == _IMAGES)
            link = Link(kind="norm", node=node, end=node, takes=(norm.input,), norm=norm)
            return self._with_relu(link) if fits else None
        if name in _SUMS:
            return self._sum(node, found, seen)
        if name in _JOINS and any(each in found for each in values):
            return Link(kind="join", node=node, end=node, takes=values)
        first = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(first, Node) or first not in found:
            return None
        if name in _MOVES or self._is_idle(node):
            typed = any(isinstance(each, torch.dtype) for each in (*node.args, *node.kwargs.values()))
            return None if typed else Link(kind="move", node=node, end=node, takes=(first,))
        if name in _AVERAGES:
            windows = self._averaged(node)
            return Link(kind="average", node=node, end=node, takes=(first,), options=windows) if windows else None
        options = self._pooled(node) if name in _POOLS else None
        return Link(kind="pool", node=node, end=node, takes=(first,), options=options) if options else None

    def _sum(self, node: Node, found: Mapping[Node, Link], seen: Seen | None) -> Link | None:
        """Return the sum of a convolution's result, which nothing else uses, and other levels of the same shape."""
        given = {"input": None, "other": None} | dict(zip(("input", "other"), node.args, strict=False)) | node.kwargs
        values = [each for each in (given.pop("input"), given.pop("other")) if isinstance(each, Node)]
        if len(set(values)) != 2 or len(node.args) > 2 or given not in ({}, {"alpha": 1}):
            return None
        shapes = set() if seen is None else {seen.shapes.get(each) for each in (*values, node)}
        if len(shapes) > 1 or None in shapes or not all(each in found for each in values):
            return None
        for first, other in sorted((values, values[::-1]), key=lambda each: -self._effects.index[each[0]]):
            if (
                found[first].node in self._images
                and found[first].end is first is found[first].node
                and only_user(first)
            ):
                return self._with_relu(Link(kind="sum", node=node, end=node, takes=(other,), layer=first))
        return None

    def _is_averaged(self, value: Node) -> bool:
        """Return whether means are all that is made of a value."""
        users = [user for user in value.users if not _asks_for_sizes(user)]
        return bool(users) and all(self._names[user] in _MEANS for user in users)

    def _is_idle(self, node: Node) -> bool:
        """Return whether a node is a dropout in eval mode."""
        if node.op == "call_module":
            called = submodule(self._module, str(node.target))
            return type(called) is nn.Dropout and not called.training
        return (
            self._names[node] == "dropout" and node.kwargs.get("training") is False and not node.kwargs.get("inplace")
        )

    def _with_relu(self, link: Link) -> Link:
        behind = only_user(link.node)
        if behind is None or activation_of(self._module, behind) != "relu":
            return link
        return replace(link, end=behind, inner=(behind,), activation="relu")

    def _pooled(self, node: Node) -> tuple[Any, ...] | None:
        """Return kernel, stride, padding, dilation and rounding mode; None for a pooling of another form."""
        given = self._options(node, _POOLED)
        kernel, stride = _windows(given)
        others = [pair_of(given.get(name, least)) for name, least in (("padding", 0), ("dilation", 1))]
        ceil_mode = given.get("ceil_mode", False)
        known = given.keys() <= set(_POOLED) and not given.get("return_indices") and type(ceil_mode) is bool
        return (kernel, stride, *others, ceil_mode) if known and None not in (kernel, stride, *others) else None

    def _averaged(self, node: Node) -> tuple[Any, ...] | None:
        """Return kernel and stride; None for an average pooling of another form than of few values each."""
        given = self._options(node, _AVERAGED)
        kernel, stride = _windows(given)
        plain = pair_of(given.get("padding", 0)) == [0, 0] and given.get("ceil_mode", False) is False
        plain = plain and given.get("divisor_override") is None and given.keys() <= set(_AVERAGED)
        return (kernel, stride) if plain and kernel and stride and math.prod(kernel) <= _FEW else None

    def _options(self, node: Node, names: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of a pooling after its input, by these names."""
        if node.op == "call_module":
            called = submodule(self._module, str(node.target))
            return {name: getattr(called, name) for name in names}
        given = dict(zip(("input", *names), node.args, strict=False)) | dict(node.kwargs)
        del given["input"]
        return given

    def _norm(self, node: Node) -> Norm | None:
        """Return a norm whose weights stay unchanged through a forward."""
        norm = norm_of(self._module, node)
        if not isinstance(norm, Norm):
            return None
        tensors = [each.tensor for each in norm.weights]
        plain = all(each.dtype is torch.float32 and each.device.type == "cpu" for each in tensors)
        if not plain or any(map(torch.Tensor.is_inference, tensors)) or not counts_updates(self._module, norm):
            return None
        steady = self._steadiness.refusal(norm.node, tensors) is None
        return norm if steady and all(bool(each.isfinite().all()) for each in tensors) else None

    def _written_classes(self) -> set[int]:
        """Return the alias classes that are written, except for a link's writes to the value it is passed."""
        own = {node for link in self._layers.values() for node in link.inner}
        for node in self._effects.nodes:
            if node in self._norms or self._names[node] in _SUMS:
                own.update(self._with_relu(Link(kind="sum", node=node, end=node, takes=())).inner)
            first = node.args[0] if node.args else None
            if self._names[node] in _SUMS and isinstance(first, Node) and first in self._images:
                own.update({node}.intersection([only_user(first)]))
        writes = (
            does.writes
            for node, does in zip(self._effects.nodes, self._effects.per_node, strict=True)
            if node not in own
        )
        return {each.alias_class for found in writes for each in found if isinstance(each, Storage)}


def _asks_for_sizes(user: Node) -> bool:
    return asks_only(user) and not (user.target is getattr and user.args[1] == "dtype")


def _held(links: Sequence[Link], giving: Collection[Node], inputs: Collection[Node]) -> set[Node]:
    """Return the values that a layer, a mean, or a link whose own value is held, takes in levels.

    Args:
        links: the links other than layers, in program order.
        giving: the values that links and layers give.
        inputs: the values that layers and means take.
    """
    held = set(giving).intersection(inputs)
    for link in reversed(links):
        if link.end in held:
            held.update(set(giving).intersection(link.takes))
    return held


def _coarse(links: Sequence[Link], held: Collection[Node], own: Mapping[Node, ValueRange]) -> set[Node]:
    """Return the values that are not held, and for which others would be held in far wider ranges than they need.

    Args:
        links: the links other than layers, in program order.
        held: the values that are held for the sake of layers, which round to these ranges in any case.
        own: the range of each value.
    """
    ranges, found = _shared([link for link in links if link.end in held], own), set[Node]()
    for link in links:
        if link.end in held:
            continue
        spreads = [ranges[each].most - ranges[each].least for each in (link.end, *link.takes)]
        if not found.isdisjoint(link.takes) or (link.kind in _KEEP_RANGE and max(spreads) > _WIDER * min(spreads)):
            found.add(link.end)
    return found


def _shared(links: Iterable[Link], own: Mapping[Node, ValueRange]) -> dict[Node, ValueRange]:
    """Return the range of each value, which it shares with the values that these links leave unchanged."""
    alike = _Groups()
    for link in links:
        if link.kind in _KEEP_RANGE:
            for value in link.takes:
                alike.join(link.end, value)
    return alike.ranges(own)


def pair_of(value: Any) -> list[int] | None:
    """Return an argument for two dimensions as two numbers; None if it has another form."""
    found = [value, value] if type(value) is int else list(value) if isinstance(value, (tuple, list)) else []
    found = found * 2 if len(found) == 1 else found
    return found if len(found) == 2 and all(type(each) is int for each in found) else None


def _windows(given: Mapping[str, Any]) -> tuple[list[int] | None, list[int] | None]:
    """Return kernel and stride of a pooling with these arguments, each None if it has another form."""
    kernel = pair_of(given.get("kernel_size"))
    return kernel, kernel if given.get("stride") in (None, [], ()) else pair_of(given["stride"])


class _Groups:
    """Values that share one range."""

    def __init__(self) -> None:
        self._parents: dict[Node, Node] = {}

    def join(self, one: Node, other: Node) -> None:
        """Let two values, and all values that share their ranges, share one range."""
        self._parents[self._root(one)] = self._root(other)

    def ranges(self, own: Mapping[Node, ValueRange]) -> dict[Node, ValueRange]:
        """Return the range of each value, which is that of its whole group."""
        joined: dict[Node, ValueRange] = {}
        for node, each in own.items():
            root = self._root(node)
            joined[root] = joined.get(root, ValueRange()).joined(each)
        return {node: joined[self._root(node)] for node in own}

    def _root(self, node: Node) -> Node:
        while (parent := self._parents.get(node, node)) is not node:
            node = parent
        return node
