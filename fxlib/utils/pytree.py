"""Nested containers: those that torch.utils._pytree knows, dataclasses, and plain objects that hold tensors.

Torch's pytree treats the last two as leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")
IsLeaf = Callable[[Any], bool]
_PYTHONS = (bool, int, float, str)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_HEAP_TYPE = 1 << 9
"""Flag in `__flags__` of classes that Python code defines."""


def leaves(value: object, path: str = "", is_leaf: IsLeaf | None = None) -> Iterator[tuple[str, object]]:
    """Yield path and value of every leaf: `[0]`, `['loss']`, `.logits[1]`, each behind `path`."""
    for below, leaf in _with_paths(value, is_leaf):
        where = path + below
        if _is_container(leaf) and not (is_leaf is not None and is_leaf(leaf)):
            for name in _names(leaf):
                yield from leaves(getattr(leaf, name), f"{where}.{name}", is_leaf)
        else:
            yield where, leaf


def has_more_leaves_than(value: object, count: int) -> bool:
    """Return whether a nested value has more leaves than `count`; the walk stops as soon as this is known."""
    found, ahead = 0, [value]
    while ahead:
        for leaf in pytree.tree_iter(ahead.pop()):
            if _is_container(leaf):
                ahead.extend(getattr(leaf, name) for name in _names(leaf))
            else:
                found += 1
            if found + len(ahead) > count:
                return True
    return False


def _with_paths(value: object, is_leaf: IsLeaf | None) -> list[tuple[str, object]]:
    try:
        return [(pytree.keystr(below), leaf) for below, leaf in pytree.tree_leaves_with_path(value, is_leaf=is_leaf)]
    except ValueError:  # a container whose class was registered without names of its parts
        return [(f"[leaf {index}]", leaf) for index, leaf in enumerate(pytree.tree_leaves(value, is_leaf=is_leaf))]


def structure(value: object) -> str:
    """Return the containers of a nested value, their classes and their keys in order, as text."""
    flat, spec = pytree.tree_flatten(value)
    inner = (f"{type(leaf).__qualname__}: {_fields(leaf)}" for leaf in flat if _is_container(leaf))
    return "; ".join([" ".join(str(spec).split()), *inner])


def mapped(function: Callable[[Any], Any], value: T, is_leaf: IsLeaf | None = None) -> T:
    """Return the same containers with the result of a function for each leaf."""

    def copied(leaf: Any) -> Any:
        if not _is_container(leaf) or (is_leaf is not None and is_leaf(leaf)):
            return function(leaf)
        other = copy.copy(leaf)
        for name in _names(leaf):
            object.__setattr__(other, name, mapped(function, getattr(leaf, name), is_leaf))  # also if it is frozen
        return other

    nested: T = pytree.tree_map(copied, value, is_leaf=is_leaf)
    return nested


def is_registered(value: object) -> bool:
    """Return whether a value is a container of a class that was registered with torch's pytree."""
    return type(value) in pytree.SUPPORTED_NODES and type(value) not in pytree.BUILTIN_TYPES


def _names(leaf: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(leaf)] if is_open(leaf) else list(vars(leaf))


def _fields(leaf: Any) -> str:
    return ", ".join(f"{name} {structure(getattr(leaf, name))}" for name in _names(leaf))


def is_open(leaf: object) -> bool:
    """Return whether a leaf of torch's pytree is a dataclass, whose fields count as parts."""
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def is_state(leaf: object) -> bool:
    """Return whether a leaf of torch's pytree is an object of a plain Python class whose attributes hold tensors."""
    return is_plain(leaf) and any(map(has_tensors, vars(leaf).values()))


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors among the leaves of torch's pytree, each as often as it occurs."""
    if isinstance(value, torch.Tensor):  # as most values are
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def has_tensors(value: object) -> bool:
    """Return whether a nested value holds a tensor, or a number that is computed from sizes, at any depth."""
    return any(
        isinstance(leaf, (torch.Tensor, *_SYMBOLIC)) or is_state(leaf)
        for leaf in ([value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value))
    )


def _is_container(leaf: object) -> bool:
    return is_open(leaf) or is_state(leaf)


def is_plain(value: object) -> bool:
    """Return whether all of an object's state is in its `__dict__`, and its class is Python's, not a torch module."""
    if isinstance(value, (type, torch.Tensor, torch.nn.Module, *_SYMBOLIC)) or not hasattr(value, "__dict__"):
        return False
    return all(_keeps_nothing_else(base) for base in type(value).__mro__[:-1])


@functools.cache
def _keeps_nothing_else(cls: type) -> bool:
    return bool(cls.__flags__ & _HEAP_TYPE) and not vars(cls).get("__slots__")


def python_number(value: Any) -> Any:
    """Return the Python number, flag or string that exactly represents a NumPy number or an enum member; else None."""
    kind = type(value)
    if kind in _PYTHONS:
        return None
    if isinstance(value, enum.Enum):
        plain = value.value if isinstance(value, (int, float, str)) else None
    elif any(base.__module__ == "numpy" and base.__name__ == "generic" for base in kind.__mro__):
        plain = value.item()
    else:
        return None
    return plain if type(plain) in _PYTHONS else None
