"""Where exactly a value lies: in the memory of which node, from which element on, with which shape and strides."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxlib.analysis.operators.in_place import SCATTERS, is_view
from fxlib.analysis.operators.layouts import Layout, layout_of, of_tensor, same
from fxlib.passes.local.reinplace.lifetimes import makes_views


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One value: `root` is the node that made the memory, and the layout's offset counts from its storage."""

    root: Node
    layout: Layout

    def matches(self, other: Place) -> bool:
        """Whether both are the very same elements in the same order."""
        ours, theirs = self.layout, other.layout
        return (
            self.root is other.root
            and ours.same_values(theirs)
            and ours.same_strides(theirs)
            and same((_offset(ours),), (_offset(theirs),))
        )


class Places:
    """The places of a graph's values, which change as operators come to write over their arguments."""

    def __init__(self) -> None:
        """Know of no change."""
        self._roots: dict[Node, Node] = {}
        self._moved: dict[Node, Place | None] = {}
        self._layouts: dict[Node, Layout | None] = {}
        self._regions: dict[Hashable, Layout | None] = {}

    def layout(self, node: Node) -> Layout | None:
        """Return the layout of a value: as the graph's metadata has it, if it was not laid otherwise since."""
        if node not in self._layouts:
            self._layouts[node] = layout_of(node)
        return self._layouts[node]

    def of(self, node: Node) -> Place | None:
        """Return a value's place; None if its layout, or where it begins in its storage, is not known."""
        if node in self._moved:
            return self._moved[node]
        layout = self.layout(node)
        if layout is None or layout.offset is None:
            return None
        root = self.root(node)
        if root not in self._moved:
            return Place(root=root, layout=layout)
        base, made = self._moved[root], self.layout(root)
        if base is None or made is None or made.offset is None:
            return None
        return Place(root=base.root, layout=_shifted(layout, _offset(base.layout) - made.offset))

    def move(self, node: Node, to: Node) -> None:
        """Let a value that had memory of its own lie where another does from now on, and its views with it."""
        self._moved[node] = self.of(to)

    def relay(self, layouts: Mapping[Node, Layout]) -> None:
        """Let values lie in other layouts from now on than the graph's metadata has it."""
        self._layouts.update(layouts)

    def begins_alike(self, node: Node, elsewhere: Node) -> bool:
        """Whether a value with memory of its own would begin at the same element of its storage in another's place."""
        place, own = self.of(elsewhere), self.layout(node)
        return place is not None and own is not None and own.offset is not None and _offset(place.layout) == own.offset

    def region(self, scatter: Node) -> Place | None:
        """Return the place of the part of its first argument that a scatter replaces; None if it is not known."""
        base = scatter.args[0]
        place = self.of(base) if isinstance(base, Node) else None
        value = base.meta.get("val") if isinstance(base, Node) else None
        if place is None or not isinstance(value, torch.Tensor):
            return None
        layout = self._viewed(scatter, value)
        if layout is None:
            return None
        return Place(root=place.root, layout=_shifted(layout, _offset(place.layout) - value.storage_offset()))

    def _viewed(self, scatter: Node, value: torch.Tensor) -> Layout | None:
        """Return the layout of a scatter's view of a value; each kind of view is made once, which takes long."""
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
    """Whether a view has its base's dtype, or is one of several or a tuple of them, which their items answer for."""
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
