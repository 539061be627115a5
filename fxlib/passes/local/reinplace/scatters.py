"""Later uses of a memory that need not stand in the way of writing it: scatters that put back what was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from fxlib.analysis.operators.access import nodes_in
from fxlib.analysis.operators.in_place import SCATTERS, is_elementwise, is_exact, variant_of
from fxlib.analysis.operators.layouts import layout_of
from fxlib.passes.local.reinplace.lifetimes import Memories
from fxlib.passes.local.reinplace.views import Place, Places

_LONGEST = 16
"""Operators that are followed from one that writes to the scatter of its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What goes with the first operator that writes."""

    operators: Sequence[Node] = ()
    """Operators that write over its result, one after another."""
    scatters: Sequence[Node] = ()
    """Scatters that are then needed no more."""

    @property
    def joined(self) -> Sequence[Node]:
        """Results besides the first operator's that come to lie in its memory."""
        return (*self.operators, *self.scatters)

    def hides(self, writer: Node, result: Node) -> bool:
        """Whether nobody could tell that results of the group lie in other strides than they would have.

        Only the group uses them, and none of its operators works by layout. The first one reads its argument in the
        argument's own layout in either case.
        """
        within = {*self.operators, *self.scatters}
        hidden = all(user in within for each in (result, *self.operators) for user in each.users)
        elementwise = writer.target in SCATTERS or is_elementwise(writer.target)
        return hidden and elementwise and all(is_exact(each) for each in self.operators)


def group_of(target: Node, result: Node, later: Sequence[Node], memories: Memories, places: Places) -> Group | None:
    """Return the group in which all `later` uses of a memory vanish once `result` lies in it; None if not all do.

    Args:
        target: the value that an operator is to write over.
        result: what it writes.
        later: the nodes that use the memory of `target` after that operator, in order.
        memories: of the graph.
        places: of the graph's values.
    """
    if not later:
        return Group()
    place = places.of(target)
    if place is None or any(each.target not in SCATTERS for each in later):
        return None
    operators = _operators(target, result, later[0].args[1], memories)
    if operators is None:
        return None
    located = {operators[-1] if operators else result: place}
    for scatter in later:
        put_back = _put_back(scatter, located, later, places)
        if put_back is None or memories.of(first(scatter)) is not memories.of(target):
            return None
        if memories.of(scatter).absolute and not places.begins_alike(scatter, first(scatter)):
            return None
        located[scatter] = put_back
    return Group(operators=operators, scatters=tuple(later))


def first(node: Node) -> Node:
    """Return the first argument of a node that has one."""
    found = node.args[0]
    assert isinstance(found, Node), node  # noqa: S101 - only operators on a tensor are decided on
    return found


def _operators(target: Node, result: Node, last: object, memories: Memories) -> tuple[Node, ...] | None:
    """Return those by which `result` becomes `last`, each writing over what the one before it wrote; None if not so."""
    found: list[Node] = []
    while last is not result:
        if len(found) == _LONGEST or not isinstance(last, Node) or variant_of(last.target) is None:
            return None
        if not last.args or not isinstance(last.args[0], Node):
            return None
        found.append(last)
        last = last.args[0]
    found.reverse()
    return tuple(found) if all(_follows(each, target, memories) for each in found) else None


def _follows(node: Node, target: Node, memories: Memories) -> bool:
    """Whether an operator may write over its argument, of which it is known that it lies in the memory of `target`."""
    before, ours, theirs = memories.of(first(node)), layout_of(first(node)), layout_of(node)
    if ours is None or theirs is None or not ours.same_values(theirs) or not ours.same_strides(theirs):
        return False
    if before.last > memories.time(node) or before.absolute or before.opaque or before.outside:
        return False
    after = memories.of(node)
    if after.absolute or after.recorded:
        return False
    taken = (before, memories.of(target))
    others = (*nodes_in(node.args[1:]), *nodes_in(dict(node.kwargs)))
    return not any(memories.of(each) in taken for each in others)


def _put_back(scatter: Node, located: dict[Node, Place], later: Sequence[Node], places: Places) -> Place | None:
    """Return the place of a scatter's first argument, if what it puts there lies there already."""
    base, part = places.of(first(scatter)), scatter.args[1]
    region, result = places.region(scatter), places.layout(scatter)
    if base is None or region is None or result is None or not isinstance(part, Node) or part not in located:
        return None
    if not region.matches(located[part]) or not base.layout.same_values(result):
        return None
    hidden = all(user in later for user in scatter.users)
    return base if hidden or base.layout.same_strides(result) else None
