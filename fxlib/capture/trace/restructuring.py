"""Find what changes which elements a container has that a server returned.

A forward is answered by the structure that the contract declares, and a container that was changed has it no longer.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Node, Proxy

from fxlib.capture.trace.values import IN_PLACE, StructuredValue
from fxlib.runtime.submodules import is_harmless

_METHODS = frozenset(
    {"append", "clear", "extend", "insert", "move_to_end", "pop", "popitem", "remove", "setdefault", "update"}
)
_ORDERING = frozenset({"reverse", "sort"})


def restructured(target: object, args: Sequence[Any]) -> Node | None:
    """Return the remote result whose structure, or that of a part, an operation changes; None if it changes none.

    Args:
        target: the function or the name of the method.
        args: its arguments, the first of which it may change.
    """
    changed = args[0] if args else None
    if isinstance(changed, StructuredValue):
        return source_of(changed.node) if _changes(changed.structure, target, args) else None
    if isinstance(changed, Proxy) and target in _METHODS and changed.node.target is operator.getitem:
        return _behind_a_method(changed.node)
    return None


def hands_over(kind: str, target: object, args: Sequence[Any]) -> bool:
    """Return whether a call hands a result of a declared structure to code of the program's, which may change it."""
    runs_own = kind == "call_module" or (kind == "call_function" and not is_harmless(target))
    return runs_own and any(isinstance(each, StructuredValue) for each in args)


def source_of(node: Node) -> Node:
    """Return the node that made the remote result of which a node is a part."""
    while node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _changes(structure: Any, target: object, args: Sequence[Any]) -> bool:
    if target is operator.setitem:
        return isinstance(args[2], (tuple, list, dict, StructuredValue)) or not _is_leaf(structure, args[1])
    if target in _ORDERING:  # what is declared of elements may hold for others afterwards
        return any(each is not None for each in structure)
    return target in _METHODS or (target in IN_PLACE and not isinstance(structure, tuple))


def _is_leaf(structure: Any, key: Any) -> bool:
    """Return whether a key is surely that of an element of which nothing is declared, as most tensors are."""
    if isinstance(structure, Mapping):
        return not isinstance(key, Proxy) and key in structure and structure[key] is None
    return type(key) is int and -len(structure) <= key < len(structure) and structure[key] is None


def _behind_a_method(node: Node) -> Node | None:
    """Return the source of a part of what a method returned (`copy`), which may be a part of the original as well."""
    behind = False
    while node.op == "call_method" or node.target is operator.getitem:
        behind |= node.op == "call_method"
        if not isinstance(node.args[0], Node):
            break
        node = node.args[0]
    return node if behind else None
