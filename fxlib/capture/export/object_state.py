"""Objects that hold tensors in the results of an exported graph, such as key-value caches; each call makes new ones.

A graph returns tensors. Where the program returned an object of a class that torch's pytree does not know, the object's
attributes are the parts of a container, which stands in the structure of the graph's results; to unflatten it makes an
object of the program's own class, without calling its constructor.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree

from fxlib.utils.pytree import has_tensors, is_state

_IMMEDIATE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_SHARED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.nn.Module)
_kinds: list[type[ObjectState]] = []


class ObjectState:
    """The attributes of one object: those that hold tensors as `parts`, numbers and the like in `context`.

    The context is data: {"parts": names, "plain": {name: value}, "order": names of all attributes}.
    """

    of: ClassVar[type]
    """The program's class."""
    held: ClassVar[dict[str, Any]]
    """The attributes that are neither tensors nor plain values: classes, functions, lists of numbers."""
    shared: ClassVar[frozenset[str]]
    """The names of those attributes that every object of the class shares with the program."""

    def __init__(self, parts: list[Any], context: dict[str, Any]) -> None:
        self.parts = parts
        self.context = context

    @classmethod
    def rebuilt(cls, parts: list[Any], context: dict[str, Any]) -> Any:
        """Return an object of the program's class with these attributes."""
        made: Any = object.__new__(cls.of)
        found = dict(zip(context["parts"], parts, strict=True)) | context["plain"]
        held = {name: value if name in cls.shared else copy.deepcopy(value) for name, value in cls.held.items()}
        made.__dict__.update({name: found[name] if name in found else held[name] for name in context["order"]})
        return made


def with_states(value: Any, persistent: Collection[int]) -> Any:
    """Return a nest with an `ObjectState` in place of each object that holds tensors.

    Args:
        value: what a program returned.
        persistent: ids of objects that outlive a call, which stay as they are.
    """

    def stand_in(leaf: Any) -> Any:
        return _state_of(leaf, persistent) if is_state(leaf) and id(leaf) not in persistent else leaf

    return pytree.tree_map(stand_in, value)


def _state_of(value: Any, persistent: Collection[int]) -> ObjectState:
    attributes = dict(vars(value))
    parts = {name: with_states(each, persistent) for name, each in attributes.items() if has_tensors(each)}
    plain = {name: each for name, each in attributes.items() if name not in parts and _is_immediate(each)}
    held = {name: each for name, each in attributes.items() if name not in parts and name not in plain}
    shared = frozenset(name for name, each in held.items() if isinstance(each, _SHARED) or id(each) in persistent)
    kind = _kind(
        type(value), {name: each if name in shared else copy.deepcopy(each) for name, each in held.items()}, shared
    )
    return kind(list(parts.values()), {"parts": list(parts), "plain": plain, "order": list(attributes)})


def _is_immediate(value: object) -> bool:
    return all(map(_is_immediate, value)) if type(value) is tuple else type(value) in _IMMEDIATE


def _kind(of: type, held: dict[str, Any], shared: frozenset[str]) -> type[ObjectState]:
    """Return the container class for objects of a class with these other attributes; torch's pytree knows it."""
    alike = [each for each in _kinds if each.of is of]
    for each in alike:
        if each.shared == shared and each.held.keys() == held.keys() and _same(each, held):
            return each
    number = f"#{len(alike) + 1}" if alike else ""
    names = {"__module__": of.__module__, "__qualname__": of.__qualname__ + number}
    kind: type[ObjectState] = type(of.__name__, (ObjectState,), {**names, "of": of, "held": held, "shared": shared})
    pytree.register_pytree_node(
        kind,
        lambda each: (each.parts, each.context),
        lambda parts, context: kind.rebuilt(list(parts), context),
        flatten_with_keys_fn=lambda each: (
            [(pytree.GetAttrKey(name), part) for name, part in zip(each.context["parts"], each.parts, strict=True)],
            each.context,
        ),
    )
    _kinds.append(kind)
    return kind


def _same(kind: type[ObjectState], held: dict[str, Any]) -> bool:
    return all(
        kind.held[name] is value if name in kind.shared else repr(kind.held[name]) == repr(value)
        for name, value in held.items()
    )
