"""What each observation of an instrumented forward means: which facts it reads, and what it changes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fxlib.capture import source
from fxlib.capture.faults import fault
from fxlib.capture.intercept import suspended
from fxlib.capture.recording.arguments_asked import ArgumentsAsked
from fxlib.capture.recording.observers import HEAP_TYPE, ObservedFunctions, functions_in, is_a, is_fx, is_observed
from fxlib.capture.recording.record import STATELESS, VALUES, Record
from fxlib.runtime.guards.capture_facts import Fact, Kind, Mark, attributes_of, contents_of, is_array

CONTAINERS = (list, dict, set, deque, bytearray)
_TABLES = ("_parameters", "_buffers", "_modules")
_MACHINERY = frozenset(
    {"threading", "_thread", "queue", "_queue", "logging", "weakref", "_weakref", "concurrent", "socket", "_socket"}
    | {"io", "_io", "multiprocessing", "asyncio", "_asyncio", "warnings", "contextvars", "_contextvars"}
)
"""Modules of Python's whose objects serve the program, and decide nothing of what it computes."""


class Observations:
    """Makes facts of what instrumented functions show. Each method is named for an observer, and given its operands."""

    def __init__(self, record: Record, functions: ObservedFunctions, arguments: ArgumentsAsked) -> None:
        self._record, self._functions, self._arguments = record, functions, arguments
        self._looked_up: dict[tuple[type, str], Any] = {}
        self._special_classes: set[type] = set()

    def begun(self, function: FunctionType | None, scope: dict[str, Any], names: tuple[str, ...]) -> None:
        """A function runs for the first time: its globals, the variables of its closure and its defaults are read."""
        for name in names:
            value = scope.get(name, Mark.ABSENT)
            self._record.fact(Kind.ITEM, scope, name, value)
            if value is Mark.ABSENT:
                builtins = scope.get("__builtins__", {})
                table = builtins if isinstance(builtins, dict) else vars(builtins)
                self._record.see(table.get(name))
        if function is None:
            return
        for name, cell in zip(self._functions.swapped[function].co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                value = Mark.ABSENT
            self._record.fact(Kind.CELL, cell, name, value)
        if function.__defaults__ or function.__kwdefaults__:
            fact = self._record.fact(Kind.DEFAULTS, function, function.__name__, None)
            fact.value = (function.__defaults__, function.__kwdefaults__)
            for each in function.__defaults__ or ():
                self._record.see(each)
            if function.__kwdefaults__:
                self._record.see(function.__kwdefaults__)
                self.contents(function.__kwdefaults__)

    # What instructions read.

    def attribute(self, name: str, owner: Any) -> None:
        """An attribute is read."""
        kind = type(owner)
        if name == "__class__" and self._record.stand_ins is not None and issubclass(kind, torch.Tensor):
            self._record.stand_ins.asked_for_class(owner)
        if kind in STATELESS or issubclass(kind, VALUES):
            return
        if kind is super:
            self._attribute_of_bases(name, owner)
        elif issubclass(kind, ModuleType):
            self._attribute_of_module(name, owner)
        elif issubclass(kind, type):
            self._attribute_of_class(name, owner)
        else:
            self._attribute_of_instance(name, owner)

    def _attribute_of_module(self, name: str, owner: ModuleType) -> None:
        if name in attributes_of(owner) or type(owner) is ModuleType:
            self._record.fact(Kind.ATTRIBUTE, owner, name, attributes_of(owner).get(name, Mark.ABSENT))
        else:
            self._getter(name, owner)

    def _attribute_of_class(self, name: str, owner: type) -> None:
        for base in owner.__mro__:
            if base.__flags__ & HEAP_TYPE:
                found = base.__dict__.get(name, Mark.ABSENT)
                self._record.fact(Kind.CLASS, base, name, found)
                if found is not Mark.ABSENT:
                    return
        if type(owner) is not type:
            self._getter(name, owner)

    def _attribute_of_bases(self, name: str, owner: Any) -> None:
        if owner.__self_class__ is not None:  # it is bound
            bases = owner.__self_class__.__mro__
            self._on_one_of(name, bases[bases.index(owner.__thisclass__) + 1 :])

    def on_class(self, name: str, kind: type) -> Any:
        """Return what the class of an object, or one of its bases, has under a name; that is a fact of each."""
        if (kind, name) not in self._looked_up:
            self._looked_up[kind, name] = self._on_one_of(name, kind.__mro__)
        return self._looked_up[kind, name]

    def _on_one_of(self, name: str, bases: Iterable[type]) -> Any:
        found: Any = Mark.ABSENT
        for base in bases:
            found = base.__dict__.get(name, Mark.ABSENT)
            if base.__flags__ & HEAP_TYPE:
                self._record.fact(Kind.CLASS, base, name, found)
            if found is not Mark.ABSENT:
                break
        return found

    def _attribute_of_instance(self, name: str, owner: Any) -> None:
        kind = type(owner)
        if issubclass(kind, tuple) and not kind.__dictoffset__:
            return
        found = self.on_class(name, kind)
        if not self._record.knows(owner):
            self._functions.discover_class(kind)
            return
        if id(owner) not in self._record.modules and kind.__flags__ & HEAP_TYPE:  # the others are what they are
            self._record.fact(Kind.TYPE, owner, None, kind)
        if found is not Mark.ABSENT and (hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")):
            self._described(name, owner, found)
            return
        if name == "__dict__":
            self._record.see(attributes_of(owner))
            return
        if kind.__dictoffset__:
            if name == "training" and is_a(owner, nn.Module):
                return  # a condition for all modules
            value = attributes_of(owner).get(name, Mark.ABSENT)
            if (
                id(owner) in self._record.modules
                and is_a(value, torch.Tensor)
                and self._record.path_in_graph(value) is not None
            ):
                self._record.fact(Kind.ATTRIBUTE, owner, name, Mark.TENSOR)
                return
            self._record.fact(Kind.ATTRIBUTE, owner, name, value)
            if value is not Mark.ABSENT:
                return
        if found is Mark.ABSENT:
            self._missing(name, owner)

    def _described(self, name: str, owner: Any, descriptor: Any) -> None:
        """A descriptor of the user's own runs, observed; another one is asked again before each run."""
        if name == "__dict__":
            self._record.see(attributes_of(owner))
        elif name != "__class__" and not any(is_observed(each.__code__) for each in functions_in(descriptor)):
            self._getter(name, owner)

    def _missing(self, name: str, owner: Any) -> None:
        if is_a(owner, nn.Module):
            tables = [attributes_of(owner).get(each, {}) for each in _TABLES]
            holding = [table for table in tables if name in table]  # no more than one: nn.Module sees to that
            for table in holding or tables:
                value = table.get(name, Mark.ABSENT)
                self._record.fact(Kind.ITEM, table, name, Mark.TENSOR if is_a(value, torch.Tensor) else value)
        elif not is_torch(type(owner).__module__) and not any(
            is_observed(each.__code__) for each in functions_in(getattr(type(owner), "__getattr__", None))
        ):
            self._getter(name, owner)

    def _getter(self, name: str, owner: Any) -> None:
        with suspended():
            value = getattr(owner, name, Mark.ABSENT)
        if not is_a(value, (MethodType, BuiltinFunctionType, *VALUES)):
            self._record.fact(Kind.GETTER, owner, name, value)

    def item(self, container: Any, key: Any) -> None:
        """An element is read."""
        if not self._record.knows(container):
            return
        if is_a(container, dict):
            try:
                self._entry_of(container, key)
            except TypeError:  # a key that cannot be one
                return
        else:
            self.contents(container)

    def _entry_of(self, table: dict[Any, Any], key: Any) -> Fact:
        return self._record.fact(Kind.ITEM, table, key, dict.get(table, key, Mark.ABSENT))

    def contained(self, key: Any, container: Any) -> None:
        """A container is asked whether it holds something."""
        self.item(container, key)

    def contents(self, value: Any, *_: Any) -> Fact | None:
        """What a container holds is looked at."""
        if type(value) in STATELESS or is_a(value, (*VALUES, type, nn.Module)) or not self._record.knows(value):
            return None
        self.special(type(value))
        if is_a(value, CONTAINERS) or is_array(value):
            held = contents_of(value)
            if is_a(value, dict):
                held = tuple((key, self._record.or_mark(each)) for key, each in held)
            return self._record.look_into(value, held)
        if hasattr(type(value), "__next__"):
            raise fault(
                f"the forward takes elements from a {type(value).__name__} that was there before, and changes it",
                hint="Make it in the forward, or take the elements before.",
            )
        return None

    def length(self, value: Any) -> None:
        """A container is counted, or asked whether it holds anything."""
        if type(value) not in CONTAINERS:
            self.contents(value)
        elif self._record.knows(value):
            self._record.count(value)

    def deep(self, value: Any, seen: set[int] | None = None) -> None:
        """Whatever can be reached from a value may be looked at, but modules, functions and classes."""
        seen = set() if seen is None else seen
        kind = type(value)
        if kind in STATELESS or id(value) in seen or is_a(value, (*VALUES, type, ModuleType, nn.Module)):
            return
        if kind.__module__.partition(".")[0] in _MACHINERY:
            return
        seen.add(id(value))
        self.special(kind)
        if is_a(value, (FunctionType, MethodType)):
            return
        if is_a(value, BuiltinFunctionType):
            self.deep(value.__self__, seen)
            return
        self._contents_if_any(value)
        for each in _elements(value):
            self.deep(each, seen)
        if kind.__dictoffset__ and not is_a(value, functools.partial):
            held = attributes_of(value)
            if self._record.knows(value):
                self._record.see(held)
                self.contents(held)
            for each in list(held.values()):
                self.deep(each, seen)

    def _contents_if_any(self, value: Any) -> None:
        if is_a(value, CONTAINERS) or is_array(value):
            self.contents(value)

    def truth(self, value: Any) -> None:
        """A value decides which way the program goes."""
        kind = type(value)
        if kind in STATELESS or issubclass(kind, VALUES):
            return
        if is_a(value, CONTAINERS) or is_array(value):
            self.length(value)
        if kind.__flags__ & HEAP_TYPE and self.on_class("__bool__", kind) is Mark.ABSENT:
            self.on_class("__len__", kind)

    def special(self, kind: type) -> None:
        """An object is given to an operator, or to a function in C: these look up special methods on its class."""
        if kind in self._special_classes or not kind.__flags__ & HEAP_TYPE or is_fx(kind.__module__):
            return
        self._special_classes.add(kind)
        for base in kind.__mro__:
            if base.__flags__ & HEAP_TYPE and base is not nn.Module:
                for name, value in list(base.__dict__.items()):
                    if name.startswith("__") and callable(value):
                        self._record.fact(Kind.CLASS, base, name, value)

    def operands(self, *values: Any) -> None:
        """Values are given to an operator."""
        for value in values:
            if type(value) not in STATELESS:
                self.deep(value)

    def formatted(self, value: Any, *_: Any) -> None:
        """A value is written into a text."""
        self.operands(value)

    def entered(self, manager: Any) -> None:
        """A context manager is entered."""
        self._functions.discover_class(type(manager))

    def matched(self, subject: Any, kind: Any, names: tuple[str, ...]) -> None:
        """A value is matched with a pattern of a class."""
        for name in (*names, *getattr(kind, "__match_args__", ())):
            self.attribute(name, subject)

    # What instructions write.

    def stored(self, name: str, owner: Any) -> None:
        """An attribute is written or deleted."""
        if id(owner) in self._record.modules or not self._record.knows(owner) or is_a(owner, VALUES):
            return  # modules are watched whole
        if is_a(owner, type):
            fact = self._record.fact(Kind.CLASS, owner, name, owner.__dict__.get(name, Mark.ABSENT))
        else:
            found = self.on_class(name, type(owner))
            if hasattr(type(found), "__set__") and not is_a(found, property):
                fact = self._record.fact(Kind.GETTER, owner, name, getattr(owner, name, Mark.ABSENT))
            elif hasattr(type(found), "__set__") or not type(owner).__dictoffset__:
                return
            else:
                fact = self._record.fact(Kind.ATTRIBUTE, owner, name, attributes_of(owner).get(name, Mark.ABSENT))
        fact.where = fact.where or source.here()

    def item_stored(self, container: Any, key: Any) -> None:
        """An element is written or deleted."""
        if not self._record.knows(container) or is_a(container, VALUES):
            return
        fact = self._entry_of(container, key) if is_a(container, dict) else self.contents(container)
        if fact is not None:
            fact.where = fact.where or source.here()

    def global_stored(self) -> None:
        """A global variable is written: it was noted where the function began."""

    # What is compared by identity.

    def identity(self, one: Any, other: Any) -> None:
        """Two values are compared by identity."""
        self._arguments.identity(one, other)

    def none(self, value: Any) -> None:
        """A value is compared with None."""
        self._arguments.identity(value, None)


def _elements(value: Any) -> Iterator[Any]:
    if is_a(value, dict):
        yield from list(dict.values(value))
    elif is_a(value, (list, tuple, set, frozenset, deque)):
        yield from list(value)


def is_torch(module: str) -> bool:
    """Whether a module of this name is torch's."""
    return module.partition(".")[0] == "torch"
