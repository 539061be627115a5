"""The memory that the values of a graph lie in: their location in it, its uses over time, and its owner.

A memory is a class of `Aliases` with the times at which its uses end; arguments of a call in flight are used until its
wait. Views use nothing by themselves; their users do. If an operator overwrites its argument, the memory of its result
is joined with its argument's.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxlib.analysis.effects.aliases import Aliases
from fxlib.analysis.effects.node_kinds import Behaviour, Behaviours, Part
from fxlib.analysis.operators.in_place import ABSOLUTE, SCATTERS, changes_tensors, is_view, measures_only
from fxlib.analysis.operators.layouts import Layout, layout_of, of_tensor, same
from fxlib.runtime import is_wait
from fxlib.runtime.ops.registry import CROSSING, TRACKERS
from fxlib.runtime.program_modes import grad_mode_after

_FROM_CALLS = frozenset({Part.CALL, Part.ISSUE, Part.WAIT})
_MOST = 16
"""Maximum number of later uses to examine, which bounds the time for each operator."""


@dataclass(slots=True, eq=False)
class Memory:
    """The memory of one class of values. Times are positions in the graph's order."""

    uses: list[int] = field(default_factory=list)
    """A heap of the times at which uses end; some of the past ones may have been removed."""
    last: int = -1
    outside: bool = False
    """Whether it belongs to the caller, or to the module."""
    opaque: bool = False
    """Whether other code may hold it, or read it in ways that the graph does not show."""
    absolute: bool = False
    """Whether some use of it counts from the beginning of the storage."""
    recorded: bool = False
    """Whether some use of it is recorded for backward, which may need its values."""
    returned: bool = False
    joined: Memory | None = None


class Lifetimes:
    """The memories of one graph, which may be joined."""

    def __init__(self, module: GraphModule, nodes: Sequence[Node], *, recording: bool, distinct_inputs: bool) -> None:
        """Find the memories, in time proportional to nodes and edges.

        Args:
            module: the module.
            nodes: the nodes of its graph, in order.
            recording: whether the graph begins with gradients being recorded.
            distinct_inputs: whether inputs, parameters and buffers are known not to overlap if they did not at capture.
        """
        lookup = Behaviours(module)
        behaviours = [lookup.of(node) for node in nodes]
        self.stoppers: list[int] = [time for time, each in enumerate(behaviours) if _may_stop(each)]
        """Positions at which the program may stop with an error."""
        self._nodes = nodes
        self._times: Mapping[Node, int] = {node: time for time, node in enumerate(nodes)}
        aliases = Aliases(module, nodes, behaviours, distinct_inputs=distinct_inputs)
        found: dict[int, Memory] = {}
        self._of = {node: found.setdefault(aliases.of(node), Memory()) for node in nodes}
        for node, behaviour in zip(nodes, behaviours, strict=True):
            recording = grad_mode_after(node, recording)
            self._enter(node, behaviour, recording=recording)
        for each in found.values():
            heapq.heapify(each.uses)

    def of(self, node: Node) -> Memory:
        """Return the memory that a node's value lies in."""
        memory = self._of[node]
        while memory.joined is not None:
            if memory.joined.joined is not None:
                memory.joined = memory.joined.joined
            memory = memory.joined
        self._of[node] = memory
        return memory

    def time(self, node: Node) -> int:
        """Return the node's position in the graph."""
        return self._times[node]

    def later(self, memory: Memory, time: int, gone: set[int]) -> list[Node]:
        """Return the nodes whose use of a memory ends after `time`, in order of time.

        The graph's output stands for uses that end at no known time, and for all uses after the first few. `time` never
        decreases from call to call. Nodes that are `gone` use nothing any more.
        """
        uses = memory.uses
        while uses and (uses[0] <= time or uses[0] in gone):
            heapq.heappop(uses)
        found, at = set[int](), 0
        front = [(uses[0], 0)] if uses else []
        while front and at < _MOST:
            end, index = heapq.heappop(front)
            found.add(end)
            for below in (2 * index + 1, 2 * index + 2):
                if below < len(uses):
                    heapq.heappush(front, (uses[below], below))
            at += 1
        if front:
            found.add(len(self._nodes) - 1)
        return [self._nodes[each] for each in sorted(found - gone)]

    def join(self, one: Memory, other: Memory) -> Memory:
        """Join two memories."""
        if one is other:
            return one
        if len(one.uses) < len(other.uses):
            one, other = other, one
        for each in other.uses:
            heapq.heappush(one.uses, each)
        other.uses, other.joined = [], one
        one.last = max(one.last, other.last)
        for name in ("outside", "opaque", "absolute", "recorded", "returned"):
            setattr(one, name, getattr(one, name) or getattr(other, name))
        return one

    def _enter(self, node: Node, behaviour: Behaviour, *, recording: bool) -> None:
        own, part = self._of[node], behaviour.part
        own.outside |= part is Part.INPUT or part is Part.STATE
        own.recorded |= recording
        held = part is Part.FENCE or node.target in TRACKERS or changes_tensors(node.target)
        held = held or (part in _FROM_CALLS and not _crossed_a_wire(node, part))
        own.opaque |= held
        idle = measures_only(node.target) or makes_views(node)
        end = self._end(node, part)
        for value in node.all_input_nodes:
            memory = self._of[value]
            memory.opaque |= held and part not in _FROM_CALLS
            memory.absolute |= node.target in ABSOLUTE and value is node.args[0]
            memory.recorded |= recording
            memory.returned |= part is Part.OUTPUT
            if not (idle and value is node.args[0]):
                memory.uses.append(end)
                memory.last = max(memory.last, end)

    def _end(self, node: Node, part: Part) -> int:
        """Return when a node stops using its arguments; those of a call in flight are used until its wait."""
        if part is not Part.ISSUE:
            return self._times[node]
        if node.users and all(is_wait(user) for user in node.users):
            return max(self._times[user] for user in node.users)
        return len(self._nodes) - 1


def makes_views(node: Node) -> bool:
    """Return whether a node only makes views of its first argument, or takes one of several views."""
    if node.target is not getitem:
        return is_view(node.target)
    several = node.args[0]
    return isinstance(several, Node) and isinstance(several.target, torch._ops.OpOverload)


def _crossed_a_wire(node: Node, part: Part) -> bool:
    issue = node.all_input_nodes[0] if part is Part.WAIT else node
    return issue.target in CROSSING


def _may_stop(behaviour: Behaviour) -> bool:
    if behaviour.part in _FROM_CALLS or behaviour.part is Part.FENCE:
        return True
    return behaviour.operator is not None and behaviour.operator.raises


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Location of one value: `root` is the node that made the memory; the layout's offset counts from its storage."""

    root: Node
    layout: Layout

    def matches(self, other: Location) -> bool:
        """Return whether both are the same elements in the same order."""
        ours, theirs = self.layout, other.layout
        return (
            self.root is other.root
            and ours.same_values(theirs)
            and ours.same_strides(theirs)
            and same((_offset(ours),), (_offset(theirs),))
        )


class Locations:
    """The locations of a graph's values, which change as operators come to overwrite their arguments."""

    def __init__(self) -> None:
        """Start without any changes."""
        self._roots: dict[Node, Node] = {}
        self._moved: dict[Node, Location | None] = {}
        self._layouts: dict[Node, Layout | None] = {}
        self._regions: dict[Hashable, Layout | None] = {}

    def layout(self, node: Node) -> Layout | None:
        """Return the layout of a value: the one it was moved to, or else the one in the graph's metadata."""
        if node not in self._layouts:
            self._layouts[node] = layout_of(node)
        return self._layouts[node]

    def of(self, node: Node) -> Location | None:
        """Return a value's location; None if its layout, or its beginning in its storage, is unknown."""
        if node in self._moved:
            return self._moved[node]
        layout = self.layout(node)
        if layout is None or layout.offset is None:
            return None
        root = self.root(node)
        if root not in self._moved:
            return Location(root=root, layout=layout)
        base, made = self._moved[root], self.layout(root)
        if base is None or made is None or made.offset is None:
            return None
        return Location(root=base.root, layout=_shifted(layout, _offset(base.layout) - made.offset))

    def move(self, node: Node, to: Node) -> None:
        """Move a value that had memory of its own to the location of another one, and its views with it."""
        self._moved[node] = self.of(to)

    def relay(self, layouts: Mapping[Node, Layout]) -> None:
        """Give values other layouts from now on than those in the graph's metadata."""
        self._layouts.update(layouts)

    def begins_alike(self, node: Node, elsewhere: Node) -> bool:
        """Return whether a value with memory of its own would begin at the same element in another location."""
        location, own = self.of(elsewhere), self.layout(node)
        return (
            location is not None
            and own is not None
            and own.offset is not None
            and _offset(location.layout) == own.offset
        )

    def region(self, scatter: Node) -> Location | None:
        """Return the location of the part of its first argument that a scatter replaces; None if it is unknown."""
        base = scatter.args[0]
        location = self.of(base) if isinstance(base, Node) else None
        value = base.meta.get("val") if isinstance(base, Node) else None
        if location is None or not isinstance(value, torch.Tensor):
            return None
        layout = self._viewed(scatter, value)
        if layout is None:
            return None
        return Location(root=location.root, layout=_shifted(layout, _offset(location.layout) - value.storage_offset()))

    def _viewed(self, scatter: Node, value: torch.Tensor) -> Layout | None:
        """Return the layout of a scatter's view of a value; each kind of view is made once, which is slow."""
        rest: Any = map_arg((scatter.args[2:], dict(scatter.kwargs)), lambda node: node.meta.get("val", node))
        options = tuple(rest[1].items())
        kind = (
            scatter.target,
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.dtype,
            value.device,
            *rest[0],
            options,
        )
        try:
            if kind in self._regions:
                return self._regions[kind]
        except TypeError:  # symbols are not hashable
            return _view(scatter, value, rest)
        self._regions[kind] = found = _view(scatter, value, rest)
        return found

    def root(self, node: Node) -> Node:
        """Return the node that made the memory of a value, as far as views lead back to it."""
        path = []
        while node not in self._roots and makes_views(node):
            below = node.args[0]
            if not isinstance(below, Node) or not _keeps_dtype(node, below):
                break
            path.append(node)
            node = below
        found = self._roots.get(node, node)
        self._roots.update(dict.fromkeys(path, found))
        return found


def _view(scatter: Node, value: torch.Tensor, rest: Any) -> Layout | None:
    try:
        return of_tensor(SCATTERS[scatter.target](value, *rest[0], **rest[1]))
    except (RuntimeError, TypeError, IndexError):
        return None


def _keeps_dtype(view: Node, below: Node) -> bool:
    """Return whether a view has its base's dtype, or is one of several views, which their items decide."""
    if view.target is getitem:
        return isinstance(below.target, torch._ops.OpOverload) and is_view(below.target)
    ours, theirs = layout_of(view), layout_of(below)
    return ours is None or theirs is None or ours.dtype == theirs.dtype


def _offset(layout: Layout) -> int | torch.SymInt:
    return 0 if layout.offset is None else layout.offset


def _shifted(layout: Layout, by: int | torch.SymInt) -> Layout:
    return Layout(
        shape=layout.shape,
        stride=layout.stride,
        dtype=layout.dtype,
        offset=_offset(layout) + by,
        device=layout.device,
    )
