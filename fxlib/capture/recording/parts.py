"""The parts of a value: its elements, the objects behind it, its slots, and the classes in what `isinstance` takes."""

from __future__ import annotations

import functools
import gc
import operator
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import BuiltinFunctionType, MappingProxyType, MemberDescriptorType, UnionType
from typing import Any

from fxlib.capture.recording.observers import HEAP_TYPE, is_a
from fxlib.capture.recording.record import METHOD_WRAPPER
from fxlib.runtime.guards.capture_facts import is_array

_SEEN_THROUGH: tuple[type, ...] = (
    *(MappingProxyType, type({}.keys()), type({}.values()), type({}.items()), functools.partial),
    *(type(OrderedDict().keys()), type(OrderedDict().values()), type(OrderedDict().items())),
    *(operator.itemgetter, operator.methodcaller),
)
_OFFSETS = frozenset({"__dictoffset__", "__vectorcalloffset__", "__weaklistoffset__"})
"""Members by which a class written in C tells Python what its instances keep for Python alone; all others are state."""


def elements(value: Any) -> Iterator[Any]:
    """Yield the elements of a container; for a dict, its values."""
    if is_a(value, dict):
        yield from list(dict.values(value))
    elif is_a(value, (list, tuple, set, frozenset, deque)):
        yield from list(value)
    elif is_array(value) and value.dtype == object:
        yield from value.flat


def behind(value: Any) -> Iterator[Any]:
    """Yield the objects behind a value of a C class: the dict of a view, or the function and arguments of a partial."""
    if is_a(value, _SEEN_THROUGH):
        yield from gc.get_referents(value)
    elif type(value) in (BuiltinFunctionType, METHOD_WRAPPER):
        yield value.__self__
    elif is_a(value, memoryview):
        yield value.obj


def classes_in(kinds: Any) -> Iterator[type]:
    """Yield the classes in what `isinstance` takes: a class, a union, or a tuple of these."""
    if is_a(kinds, (tuple, UnionType)):
        for each in kinds if is_a(kinds, tuple) else kinds.__args__:
            yield from classes_in(each)
    elif is_a(kinds, type):
        yield kinds


def slots_of(kind: type) -> Iterator[str]:
    """Yield the names of the attributes that instances of a class keep in slots."""
    for base in kind.__mro__ if kind.__flags__ & HEAP_TYPE else ():
        if base.__flags__ & HEAP_TYPE and not is_torch(base.__module__):
            members = (name for name, each in base.__dict__.items() if type(each) is MemberDescriptorType)
            yield from (name for name in members if name not in _OFFSETS)


def is_torch(module: str) -> bool:
    """Return whether a module of this name belongs to torch."""
    return module.partition(".")[0] == "torch"
