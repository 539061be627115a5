"""Let operators overwrite arguments that are no longer needed, and drop copies that then become superfluous.

The algorithm is that of `torch.fx.passes.reinplace`, for a graph of ATen operators: `b = foo(a)` may overwrite `a` if
`a` has the shape, dtype and strides of `b`, the memory of `a` has no later use through any alias, no other argument may
share it, and it does not belong to the caller or the module. A later use does not count if it is a `view_scatter` that
only writes the result back to where it then already is; that scatter is removed. Here uses are kept by memory and in
order of time, so that one pass over the graph decides everything.

A value and its views may get other strides if that makes no difference: every user of the value, or of a view of it,
gives the same bits in every layout, and the strides of results do not change. Torch itself computes the strides, on
tensors without memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.analysis.effects.gradients import may_record_gradients
from fxlib.analysis.layers import under_autocast
from fxlib.analysis.operators.arguments import nodes_in
from fxlib.analysis.operators.in_place import (
    ABSOLUTE,
    SCATTERS,
    Overload,
    cast_back,
    commutes,
    gives_truths,
    is_elementwise,
    is_exact,
    variant_of,
)
from fxlib.analysis.operators.layouts import Layout, layout_of, of_tensor
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import VALUE_KEYS
from fxlib.passes.infra.introduced import Introduced
from fxlib.passes.local.reinplace.lifetimes import Lifetimes, Location, Locations, makes_views
from fxlib.reasons import Declined, Reason
from fxlib.runtime import CapturedModule

_COPY = torch.ops.aten.copy_.default

_LONGEST = 16
"""Maximum number of operators to follow from one that writes to the scatter of its result."""


@register_pass(
    "reinplace",
    preserves="bitwise",
    introduces=Introduced.of(_COPY, *SCATTERS.values(), in_place=True),
    version="2",
)
class Reinplace(GraphPass):
    """Turn ATen operators into in-place variants where that makes no difference, as in `torch.fx.passes.reinplace`.

    It applies where no gradients are recorded: a module captured under `torch.no_grad()`, a plain GraphModule that is
    rewritten under it, a workload of mode "forward", or a no-grad block. Shapes and strides are those of the graph's
    metadata. Inputs, parameters and buffers are written only if the program itself overwrites them by `copy_`. Nothing
    is written in a block of autocast, which casts the arguments of operators, but not those of their variants.
    """

    distinct_inputs: bool = False
    """The caller's word that inputs, parameters and buffers share memory only if they did at capture; without it, any
    may share memory with any other."""

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        found = _plan(module, recording=_is_recorded(module, context), distinct_inputs=self.distinct_inputs)
        for step in found.steps:
            _take(module.graph, step)
        return PassResult(module, changes=len(found.steps), declined=found.declined)


def _is_recorded(module: GraphModule, context: Context) -> bool:
    """Return whether gradients are recorded when the module's graph begins to run."""
    if context.workload is not None and context.workload.mode == "forward":
        return False
    return may_record_gradients(module) if isinstance(module, CapturedModule) else torch.is_grad_enabled()


def _take(graph: Graph, step: _Step) -> None:
    node = step.node
    if isinstance(step, _Overwrite):
        if step.swapped:
            node.args = (node.args[1], node.args[0])
        node.target = step.variant
        _lie_as(node, node.args[0])
        if step.cast is not None:
            _replace(graph, step.cast, node)
        for view, made in step.views.items():
            _relay(view, made)
        return
    if isinstance(step, _Store):
        _store(graph, node)
    into = node.args[0]
    assert isinstance(into, Node), node  # noqa: S101 - no other step is planned
    _replace(graph, node, into)


def _store(graph: Graph, scatter: Node) -> None:
    """Copy the value that a scatter inserts into its first argument at the scatter's position."""
    into, part, *rest = scatter.args
    view = SCATTERS[scatter.target]
    with graph.inserting_before(scatter):
        region = graph.call_function(view, (into, *rest), dict(scatter.kwargs))
        copied = graph.call_function(torch.ops.aten.copy_.default, (region, part))
    for made in (region, copied):
        made.meta = {name: value for name, value in scatter.meta.items() if name not in VALUE_KEYS}
        _lie_as(made, part)


def _lie_as(node: Node, other: object) -> None:
    """Record that a node's value has the shape and strides of another's from now on."""
    assert isinstance(other, Node), node  # noqa: S101 - no other step is planned
    for name in VALUE_KEYS:
        node.meta.pop(name, None)
        if name in other.meta:
            node.meta[name] = other.meta[name]


def _relay(view: Node, made: object) -> None:
    """Record that a view has the strides of a tensor without memory from now on."""
    value = view.meta.pop("val", None)
    if value is not None and "val" in view.all_input_nodes[0].meta:
        assert callable(view.target), view  # noqa: S101 - views are made by operators
        view.meta["val"] = view.target(*map_arg(view.args, lambda each: each.meta["val"]), **view.kwargs)
    if "tensor_meta" in view.meta:
        view.meta["tensor_meta"] = pytree.tree_map_only(torch.Tensor, _extract_tensor_metadata, made)


def _replace(graph: Graph, node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overwrite:
    """The operator becomes its `variant`, on its second argument if `swapped`; `cast`, if any, becomes the operator.

    Some `views` of its result get other strides: each, in order, those of a given tensor without memory.
    """

    node: Node
    variant: Overload
    swapped: bool = False
    cast: Node | None = None
    views: Mapping[Node, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Store:
    """The scatter becomes a copy into its first argument."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vanish:
    """The node's value lies in its first argument already, which replaces it."""

    node: Node


_Step = _Overwrite | _Store | _Vanish


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The steps to take, in graph order, and what was declined."""

    steps: Sequence[_Step]
    declined: tuple[Declined, ...]


def _plan(module: GraphModule, *, recording: bool, distinct_inputs: bool) -> _Plan:
    """Decide for every operator of a graph, in time proportional to its nodes and edges.

    Args:
        module: the module, which does not change.
        recording: whether gradients are recorded when its graph begins to run.
        distinct_inputs: whether inputs, parameters and buffers are known not to overlap if they did not at capture.
    """
    return _Planner(module, recording=recording, distinct_inputs=distinct_inputs).run()


class _Planner:
    """One walk over a graph, which decides on each operator in turn."""

    def __init__(self, module: GraphModule, *, recording: bool, distinct_inputs: bool) -> None:
        self._nodes = list(module.graph.nodes)
        self._autocast = set(under_autocast(self._nodes))
        self._lifetimes = Lifetimes(module, self._nodes, recording=recording, distinct_inputs=distinct_inputs)
        self._locations = Locations()
        self._steps: list[_Step] = []
        self._declined: list[Declined] = []
        self._gone: set[int] = set()
        self._settled: set[Node] = set()

    def run(self) -> _Plan:
        for node in self._nodes:
            if node in self._settled or node.op != "call_function" or not node.args:
                continue
            if node.target is _COPY:
                self._copy_back(node)
            elif node.target in SCATTERS or variant_of(node.target) is not None:
                reason = self._decide(node)
                if reason is not None:
                    self._declined.append(reason)
        return _Plan(steps=tuple(self._steps), declined=tuple(self._declined))

    def _decide(self, node: Node) -> Declined | None:
        """Let a node overwrite its first argument if it may, or its second; otherwise return why not."""
        target, *others = node.args
        if not isinstance(target, Node):
            return None
        if node in self._autocast:
            return Declined(node=node.name, reason=Reason.AUTOCAST)  # it casts no arguments of the variant
        declined = self._decide_on(node, target)
        if declined is None or not commutes(node) or not isinstance(others[0], Node):
            return declined
        return declined if self._decide_on(node, others[0]) is not None else None

    def _decide_on(self, node: Node, target: Node) -> Declined | None:
        layout = self._locations.layout(target)
        cast = cast_back(node, layout.dtype) if layout is not None and gives_truths(node.target) else None
        result = node if cast is None else cast
        refusal = self._refusal(node, target, result)
        if refusal is not None:
            return refusal
        later = self._later(target, self._lifetimes.time(node))
        group = None if later is None else _group_of(target, result, later, self._lifetimes, self._locations)
        if group is None or not self._outlive(result, group, target):
            return self._still_used(node, target)
        seen = not self._lie_alike(target, result) and not group.hides(node, result)
        found = self._relaid(node, target, result, group) if seen else None
        if seen and found is None:
            return Declined(node=node.name, reason=Reason.OTHER_LAYOUT, detail=target.name)
        if sum(self._lifetimes.of(each).returned for each in (result, *group.joined)) > 1:
            return Declined(node=node.name, reason=Reason.OUTPUTS_WOULD_SHARE)
        self._take(node, target, result, found)
        self._follow(group)
        return None

    def _refusal(self, node: Node, target: Node, result: Node) -> Declined | None:
        """Return what keeps a node from overwriting its first argument, regardless of later uses."""
        ours, theirs = self._locations.layout(target), self._locations.layout(result)
        memory, own = self._lifetimes.of(target), self._lifetimes.of(result)
        others = [*nodes_in(node.args), *nodes_in(dict(node.kwargs))]
        others.remove(target)
        if ours is None or theirs is None:
            return Declined(node=node.name, reason=Reason.LAYOUT_UNKNOWN)
        if not ours.same_values(theirs) or (own.absolute and not self._locations.begins_alike(result, target)):
            return Declined(node=node.name, reason=Reason.OTHER_LAYOUT, detail=target.name)
        if not ours.same_strides(theirs) and not ours.has_distinct_elements:
            return Declined(node=node.name, reason=Reason.OTHER_LAYOUT, detail=target.name)
        if memory.recorded or own.recorded:
            return Declined(node=node.name, reason=Reason.MAY_BE_SAVED, remedy="capture under torch.no_grad()")
        if any(self._lifetimes.of(each) is memory for each in others):
            return Declined(node=node.name, reason=Reason.ARGUMENT_SHARED, detail=target.name)
        if memory.opaque:
            return Declined(node=node.name, reason=Reason.MEMORY_HELD, detail=target.name)
        return None

    def _later(self, target: Node, time: int) -> list[Node] | None:
        """Return the uses of a value's memory that a write must account for; None if it may not be written at all.

        Memory from outside may be written if the program itself overwrites it before it ends or can stop, until then.
        """
        memory = self._lifetimes.of(target)
        later = self._lifetimes.later(memory, time, self._gone)
        if not memory.outside:
            return later
        end = self._overwritten(target, later)
        stop = bisect_right(self._lifetimes.stoppers, time)
        if end is None or memory.absolute:
            return None
        if stop < len(self._lifetimes.stoppers) and self._lifetimes.stoppers[stop] < self._lifetimes.time(end):
            return None
        return later[: later.index(end)]

    def _overwritten(self, target: Node, later: Sequence[Node]) -> Node | None:
        """Return the copy by which the program overwrites the input that a value lies in."""
        location = self._locations.of(target)
        root = self._locations.root(target) if location is None else location.root
        end = next((each for each in later if each.target is _COPY and each.args[0] is root), None)
        if end is None or not isinstance(source := end.args[1], Node):
            return None
        return None if self._lifetimes.of(source) is self._lifetimes.of(target) else end  # it copies an old value

    def _outlive(self, result: Node, group: _Group, target: Node) -> bool:
        """Return whether memory from outside holds the results while they are used, and then its right contents."""
        memory = self._lifetimes.of(target)
        if not memory.outside:
            return True
        joined = (result, *group.joined)
        later = self._lifetimes.later(memory, self._lifetimes.time(result), self._gone)
        end = self._overwritten(target, later)
        if end is None or any(self._lifetimes.of(each).last > self._lifetimes.time(end) for each in joined):
            return False
        source = end.args[1]
        if not isinstance(source, Node) or all(
            self._lifetimes.of(each) is not self._lifetimes.of(source) for each in joined
        ):
            return True
        # The copy would be within the same memory, which is either no copy or not allowed.
        here = self._locations.of(_first(end))
        lies = _first(source) if source in group.joined else target
        there = self._locations.of(lies) if source in joined else None
        return here is not None and there is not None and here.matches(there)

    def _still_used(self, node: Node, target: Node) -> Declined:
        memory = self._lifetimes.of(target)
        if memory.outside:
            return Declined(node=node.name, reason=Reason.INPUT_KEPT, detail=target.name)
        later = self._lifetimes.later(memory, self._lifetimes.time(node), self._gone)
        return Declined(node=node.name, reason=Reason.STILL_USED, detail=later[0].name)

    def _lie_alike(self, target: Node, result: Node) -> bool:
        ours, theirs = self._locations.layout(target), self._locations.layout(result)
        return ours is not None and theirs is not None and ours.same_strides(theirs)

    def _relaid(self, node: Node, target: Node, result: Node, group: _Group) -> _Relaid | None:
        """Return the layouts of a node's result and its views if it lies in `target`; None if the results could change.

        The node reads its argument in the argument's own layout in either case.
        """
        layout = self._locations.layout(target)
        if layout is None or node.target in SCATTERS or not is_elementwise(node.target) or group.joined:
            return None
        return None if self._lifetimes.of(result).absolute else _in_other_strides(result, layout, self._locations)

    def _take(self, node: Node, target: Node, result: Node, found: _Relaid | None = None) -> None:
        """Let a node overwrite `target`; its result and the result's views may get other strides."""
        if found is not None:
            self._locations.relay(found.layouts)
        self._join(target, result)
        self._settled.update((node, result))
        variant = None if node.target in SCATTERS else variant_of(node.target)
        if variant is None:
            self._steps.append(_Store(node=node))
        else:
            swapped, cast = target is not node.args[0], None if result is node else result
            views = {} if found is None else found.views
            self._steps.append(_Overwrite(node=node, variant=variant, swapped=swapped, cast=cast, views=views))

    def _follow(self, group: _Group) -> None:
        """Carry out at once what the first operator of a group was allowed for."""
        for each in group.operators:
            self._take(each, _first(each), each)
        for each in group.scatters:
            self._join(_first(each), each)
            self._settled.add(each)
            self._gone.add(self._lifetimes.time(each))
            self._steps.append(_Vanish(node=each))

    def _join(self, target: Node, result: Node) -> None:
        self._locations.move(result, target)
        self._lifetimes.join(self._lifetimes.of(target), self._lifetimes.of(result))

    def _copy_back(self, node: Node) -> None:
        """Remove a copy of a value onto itself."""
        into, source = node.args[:2]
        here, there = (self._locations.of(each) if isinstance(each, Node) else None for each in (into, source))
        if here is not None and there is not None and here.matches(there):
            self._steps.append(_Vanish(node=node))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The operators and scatters that go with the first operator that writes."""

    operators: Sequence[Node] = ()
    """Operators that overwrite its result, one after another."""
    scatters: Sequence[Node] = ()
    """Scatters that become superfluous."""

    @property
    def joined(self) -> Sequence[Node]:
        """Results that come to lie in its memory, besides the first operator's."""
        return (*self.operators, *self.scatters)

    def hides(self, writer: Node, result: Node) -> bool:
        """Return whether other strides for the group's results would make no difference.

        It does if only the group uses them, and none of its operators depends on the layout. The first one reads its
        argument in the argument's own layout in either case.
        """
        within = {*self.operators, *self.scatters}
        hidden = all(user in within for each in (result, *self.operators) for user in each.users)
        elementwise = writer.target in SCATTERS or is_elementwise(writer.target)
        return hidden and elementwise and all(is_exact(each) for each in self.operators)


def _group_of(
    target: Node, result: Node, later: Sequence[Node], lifetimes: Lifetimes, locations: Locations
) -> _Group | None:
    """Return the group in which all `later` uses of a memory vanish once `result` lies in it; None if not all do.

    Args:
        target: the value that an operator would overwrite.
        result: the value that it writes.
        later: the nodes that use the memory of `target` after that operator, in order.
        lifetimes: the memories of the graph.
        locations: the locations of the graph's values.
    """
    if not later:
        return _Group()
    location = locations.of(target)
    if location is None or any(each.target not in SCATTERS for each in later):
        return None
    operators = _operators(target, result, later[0].args[1], lifetimes)
    if operators is None:
        return None
    located = {operators[-1] if operators else result: location}
    for scatter in later:
        put_back = _put_back(scatter, located, later, locations)
        if put_back is None or lifetimes.of(_first(scatter)) is not lifetimes.of(target):
            return None
        if lifetimes.of(scatter).absolute and not locations.begins_alike(scatter, _first(scatter)):
            return None
        located[scatter] = put_back
    return _Group(operators=operators, scatters=tuple(later))


def _first(node: Node) -> Node:
    """Return the first argument of a node that has one."""
    found = node.args[0]
    assert isinstance(found, Node), node  # noqa: S101 - only operators on a tensor are decided on
    return found


def _operators(target: Node, result: Node, last: object, lifetimes: Lifetimes) -> tuple[Node, ...] | None:
    """Return the operators by which `result` becomes `last`, each overwriting the previous result, or None."""
    found: list[Node] = []
    while last is not result:
        if len(found) == _LONGEST or not isinstance(last, Node) or variant_of(last.target) is None:
            return None
        if not last.args or not isinstance(last.args[0], Node):
            return None
        found.append(last)
        last = last.args[0]
    found.reverse()
    return tuple(found) if all(_follows(each, target, lifetimes) for each in found) else None


def _follows(node: Node, target: Node, lifetimes: Lifetimes) -> bool:
    """Return whether an operator may overwrite its argument, which is known to lie in the memory of `target`."""
    before, ours, theirs = lifetimes.of(_first(node)), layout_of(_first(node)), layout_of(node)
    if ours is None or theirs is None or not ours.same_values(theirs) or not ours.same_strides(theirs):
        return False
    if before.last > lifetimes.time(node) or before.absolute or before.opaque or before.outside:
        return False
    after = lifetimes.of(node)
    if after.absolute or after.recorded:
        return False
    taken = (before, lifetimes.of(target))
    others = (*nodes_in(node.args[1:]), *nodes_in(dict(node.kwargs)))
    return not any(lifetimes.of(each) in taken for each in others)


def _put_back(
    scatter: Node, located: dict[Node, Location], later: Sequence[Node], locations: Locations
) -> Location | None:
    """Return the location of a scatter's first argument if what the scatter inserts already lies there."""
    base, part = locations.of(_first(scatter)), scatter.args[1]
    region, result = locations.region(scatter), locations.layout(scatter)
    if base is None or region is None or result is None or not isinstance(part, Node) or part not in located:
        return None
    if not region.matches(located[part]) or not base.layout.same_values(result):
        return None
    hidden = all(user in later for user in scatter.users)
    return base if hidden or base.layout.same_strides(result) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relaid:
    """A value and its views as they would lie, each after the value that it is a view of."""

    layouts: Mapping[Node, Layout]
    """Layouts of values that are one tensor; offsets count from the beginning of the storage of the value."""
    views: Mapping[Node, object]
    """For each view, a tensor without memory that lies so, or several."""


def _in_other_strides(value: Node, layout: Layout, locations: Locations) -> _Relaid | None:
    """Return the layouts of a value and its views if the value had `layout`; None if results could change.

    The time is proportional to the views, their users, and the arguments of these.

    Args:
        value: the result of an operator.
        layout: a layout with the value's shape and dtype, and other strides.
        locations: the present locations of the graph's values.
    """
    if not _is_fixed(layout):
        return None
    found: dict[Node, object] = {value: _empty(layout)}
    try:
        readers = _readers(value, found, locations)
        if readers is None or not all(_stays(each, found, locations) for each in readers):
            return None
    except RuntimeError:  # a view that would have to copy
        return None
    layouts = dict[Node, Layout]()
    for node, made in found.items():
        own = of_tensor(made) if isinstance(made, torch.Tensor) else None
        if own is not None and own.offset is not None:
            offset = None if layout.offset is None else layout.offset + own.offset
            layouts[node] = replace(own, offset=offset, device=layout.device)
    del found[value]
    return _Relaid(layouts=layouts, views=found)


def _readers(value: Node, found: dict[Node, object], locations: Locations) -> dict[Node, None] | None:
    """Add the views of a value to `found`, and return all other users of them; None if their bits could change."""
    readers: dict[Node, None] = {}
    reached = [value]
    for node in reached:
        for user in node.users:
            if makes_views(user) and user.target not in ABSOLUTE and user.all_input_nodes == [node]:
                found[user] = _run(user, found, locations)
                reached.append(user)
            elif is_exact(user) and all(_is_fixed(locations.layout(each)) for each in user.all_input_nodes):
                readers[user] = None
            else:
                return None
    return readers


def _stays(reader: Node, found: Mapping[Node, object], locations: Locations) -> bool:
    """Return whether an operator's result keeps its layout."""
    made, now = _run(reader, found, locations), locations.layout(reader)
    then = of_tensor(made) if isinstance(made, torch.Tensor) else None
    if now is None or then is None:
        return False
    return replace(then, device=None).same_values(now) and then.same_strides(now)


@torch.no_grad()
def _run(node: Node, found: Mapping[Node, object], locations: Locations) -> object:
    """Run an operator on tensors without memory."""

    def given(argument: Node) -> Any:
        known = locations.layout(argument)
        return found[argument] if argument in found or known is None else _empty(known)

    args: Any = map_arg(node.args, given)
    kwargs: Any = map_arg(dict(node.kwargs), given)
    assert callable(node.target), node  # noqa: S101 - only operators are run
    return node.target(*args, **kwargs)


def _empty(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def _is_fixed(layout: Layout | None) -> bool:
    """Return whether the layout is known, and the same for inputs of all sizes."""
    return layout is not None and all(isinstance(size, int) for size in (*layout.shape, *layout.stride))
