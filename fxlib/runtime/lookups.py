"""Lookups of rows by ids, which raise for an id that is none; compiled code may return anything for such an id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional

from fxlib.runtime.submodules import submodule

_ARGUMENTS: Final[Mapping[Callable[..., Any] | str, Sequence[str]]] = {
    torch.ops.aten.embedding.default: ("weight", "indices"),
    functional.embedding: ("input", "weight", "padding_idx", "max_norm"),
}
"""The first arguments of the functions that look rows up; with a `max_norm` they write to the table."""
_FEW: Final = 64
"""The number of ids up to which Python compares them sooner than an operator of torch does."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup in a table of the module.

    Attributes:
        ids: the node that gives the ids.
        table: the rows, [rows, ...].
        weight: the node that reads the table; None if a submodule has it.
    """

    ids: Node
    table: torch.Tensor
    weight: Node | None


def lookup_of(module: nn.Module, node: Node) -> Lookup | None:
    """Return the lookup that a node is; None if it is none, or one that writes to its table or has no fixed one."""
    if node.op == "call_module":
        called = submodule(module, str(node.target))
        ids = node.args[0] if node.args else node.kwargs.get("input")
        if type(called) is not nn.Embedding or called.max_norm is not None or not isinstance(ids, Node):
            return None
        return Lookup(ids, called.weight, None)
    if node.op != "call_function" or node.target not in _ARGUMENTS:
        return None
    given = dict(zip(_ARGUMENTS[node.target], node.args, strict=False)) | node.kwargs
    ids, weight = given.get("input", given.get("indices")), given.get("weight")
    if not isinstance(ids, Node) or not isinstance(weight, Node) or given.get("max_norm") is not None:
        return None
    if weight.op != "get_attr":
        return None
    table = attrgetter(str(weight.target))(module)
    return Lookup(ids, table, weight) if isinstance(table, torch.Tensor) and table.dim() else None


def are_rows(ids: Any, rows: int) -> bool:
    """Return whether all ids are rows of a table that has so many.

    On a device, only Inductor's code runs, which asserts that itself.
    """
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_complex():
        return False
    if not ids.numel() or ids.device.type != "cpu":
        return True
    if ids.numel() <= _FEW:  # an operator would take longer to reach
        found = [ids.tolist()]
        while isinstance(found[0], list):
            found = list(chain.from_iterable(found))
        return all(0 <= each < rows for each in found)
    least, most = torch.aminmax(ids)
    return int(least) >= 0 and int(most) < rows
