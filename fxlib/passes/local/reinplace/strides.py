"""Whether a value may lie in other strides than it would have, and how its views lie then.

It may where nobody can tell: whatever uses the value, or a view of it, gives the same bits in every layout, and a
result that still lies as it does now. So nothing changes but the value and its views. Strides are asked of torch
itself, on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxlib.analysis.operators.in_place import ABSOLUTE, is_exact
from fxlib.analysis.operators.layouts import Layout, of_tensor
from fxlib.passes.local.reinplace.lifetimes import makes_views
from fxlib.passes.local.reinplace.views import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaid:
    """A value and its views as they would lie, each after what it is a view of."""

    layouts: Mapping[Node, Layout]
    """Layouts of values that are one tensor; offsets count from the beginning of the storage of the value."""
    views: Mapping[Node, object]
    """For each view, a tensor without memory that lies so, or several."""


def relaid(value: Node, layout: Layout, places: Places) -> Relaid | None:
    """Return how a value and its views would lie if the value lay in `layout`; None if anything else could tell.

    The time is proportional to the views, their users, and the arguments of these.

    Args:
        value: what an operator makes.
        layout: with the value's shape and dtype, and other strides.
        places: of the graph's values as they lie now.
    """
    if not _is_fixed(layout):
        return None
    found: dict[Node, object] = {value: _empty(layout)}
    try:
        readers = _readers(value, found, places)
        if readers is None or not all(_stays(each, found, places) for each in readers):
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
    return Relaid(layouts=layouts, views=found)


def _readers(value: Node, found: dict[Node, object], places: Places) -> dict[Node, None] | None:
    """Enter the views of a value into `found`, and return what else uses it or them; None if its bits could change."""
    readers: dict[Node, None] = {}
    reached = [value]
    for node in reached:
        for user in node.users:
            if makes_views(user) and user.target not in ABSOLUTE and user.all_input_nodes == [node]:
                found[user] = _run(user, found, places)
                reached.append(user)
            elif is_exact(user) and all(_is_fixed(places.layout(each)) for each in user.all_input_nodes):
                readers[user] = None
            else:
                return None
    return readers


def _stays(reader: Node, found: Mapping[Node, object], places: Places) -> bool:
    """Whether an operator's result lies as it does now."""
    made, now = _run(reader, found, places), places.layout(reader)
    then = of_tensor(made) if isinstance(made, torch.Tensor) else None
    if now is None or then is None:
        return False
    return replace(then, device=None).same_values(now) and then.same_strides(now)


@torch.no_grad()
def _run(node: Node, found: Mapping[Node, object], places: Places) -> object:
    """Run an operator on tensors without memory."""

    def given(argument: Node) -> Any:
        known = places.layout(argument)
        return found[argument] if argument in found or known is None else _empty(known)

    args: Any = map_arg(node.args, given)
    kwargs: Any = map_arg(dict(node.kwargs), given)
    assert callable(node.target), node  # noqa: S101 - only operators are run
    return node.target(*args, **kwargs)


def _empty(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def _is_fixed(layout: Layout | None) -> bool:
    """Whether the layout is known, and the same for inputs of all sizes."""
    return layout is not None and all(isinstance(size, int) for size in (*layout.shape, *layout.stride))
