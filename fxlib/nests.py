"""Nests of containers, those that torch.utils._pytree knows and dataclasses, whose fields it takes for one leaf."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils import _pytree as pytree

T = TypeVar("T")


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield path and value of every leaf: `[0]`, `['loss']`, `.logits[1]`, each behind `path`."""
    for place, leaf in pytree.tree_leaves_with_path(value):
        where = path + pytree.keystr(place)
        if _is_open(leaf):
            for each in dataclasses.fields(leaf):
                yield from leaves(getattr(leaf, each.name), f"{where}.{each.name}")
        else:
            yield where, leaf


def structure(value: object) -> str:
    """Return the containers of a nest, their classes and their keys in order, as text."""
    flat, spec = pytree.tree_flatten(value)
    inner = (f"{type(leaf).__qualname__}: {_fields(leaf)}" for leaf in flat if _is_open(leaf))
    return "; ".join([" ".join(str(spec).split()), *inner])


def mapped(function: Callable[[Any], Any], value: T) -> T:
    """Return a nest of the same containers, with what a function makes of each leaf."""

    def twin(leaf: Any) -> Any:
        if not _is_open(leaf):
            return function(leaf)
        other = copy.copy(leaf)
        for each in dataclasses.fields(leaf):
            object.__setattr__(other, each.name, mapped(function, getattr(leaf, each.name)))  # a frozen one, too
        return other

    nest: T = pytree.tree_map(twin, value)
    return nest


def _fields(leaf: Any) -> str:
    return ", ".join(f"{each.name} {structure(getattr(leaf, each.name))}" for each in dataclasses.fields(leaf))


def _is_open(leaf: object) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
