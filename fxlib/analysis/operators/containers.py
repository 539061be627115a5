"""Which values are tuples and lists for all that a graph tells.

`+` adds tensors, and joins lists. A sum of tensors has memory of its own; a joined list holds the very tensors that its
parts hold. A value that nothing in the graph shows to be a container is taken for a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import get_origin

from torch.fx import Node

from fxlib.analysis.effects.resources import contract_of_call
from fxlib.analysis.operators.schemas import makes_container

JOINING: frozenset[object] = frozenset({operator.add, operator.mul})
"""Operators that join lists, or repeat one, and work on tensors as well."""


def containers_made(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that join containers, and those that take a slice of one, in one pass over a program's order."""
    found: set[Node] = set()
    for node in nodes:
        if node.target in JOINING:
            if any(_is_container(each, found) for each in node.args):
                found.add(node)
        elif node.target is operator.getitem and isinstance(node.args[1], slice) and _is_container(node.args[0], found):
            found.add(node)
    return found


def _is_container(value: object, made: set[Node]) -> bool:
    if isinstance(value, (tuple, list)):
        return True
    if not isinstance(value, Node):
        return False
    if value in made:
        return True
    if value.op == "placeholder":
        kind = get_origin(value.type) or value.type
        return isinstance(kind, type) and issubclass(kind, (tuple, list))
    contract = contract_of_call(value)
    declared = contract is not None and isinstance(contract.structure, (tuple, list))
    return declared or (value.op in ("call_function", "call_method") and makes_container(value.target))
