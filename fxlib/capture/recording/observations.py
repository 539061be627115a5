"""Translate each observation of an instrumented forward into facts that the forward reads and state that it changes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from contextvars import Context
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from fxlib.capture import source
from fxlib.capture.handled_errors import capture_error
from fxlib.capture.intercept import suspended
from fxlib.capture.recording.argument_assumptions import ArgumentAssumptions
from fxlib.capture.recording.context_managers import may_swallow
from fxlib.capture.recording.observers import (
    HEAP_TYPE,
    ObservedFunctions,
    functions_in,
    is_a,
    is_fx,
    is_instrumented,
    is_observed,
)
from fxlib.capture.recording.parts import behind, classes_in, elements, is_torch, slots_of
from fxlib.capture.recording.record import STATELESS, VALUES, Record
from fxlib.runtime.guards.capture_facts import (
    Fact,
    Kind,
    attributes_of,
    class_items,
    computed,
    contents_of,
    context_items,
    is_array,
    is_container,
    print_settings,
)
from fxlib.runtime.guards.dict_entries import Mark
from fxlib.runtime.submodules import TABLES

MACHINERY = frozenset(
    {"threading", "_thread", "queue", "_queue", "logging", "weakref", "_weakref", "concurrent", "socket", "_socket"}
    | {"io", "_io", "multiprocessing", "asyncio", "_asyncio", "warnings", "contextvars", "_contextvars"}
)
"""Standard modules whose objects do not influence what a program computes."""

_ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift"),
    *("and", "xor", "or"),
)
_OPERATORS = frozenset(
    f"__{each}__"
    for each in (
        *(prefix + name for name in _ARITHMETIC for prefix in ("", "r", "i")),
        *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "len", "iter", "contains", "getitem", "index"),
        *("int", "float", "complex", "neg", "pos", "invert", "abs", "round", "call", "format", "str", "repr"),
        *("getattribute", "getattr"),
    )
)
"""Methods that change what an operator or a function in C does, once a class has them."""
_OF_CLASSES = frozenset({"__name__", "__qualname__"})
"""Attributes of a class that `type` computes, and that anybody may set."""
_OF_METHODS = frozenset({"__func__", "__self__", "__class__"})
"""Attributes of a bound method itself; all others are its function's."""
_NAMED = (type, FunctionType, MethodType)
_AT_ONCE = frozenset({*VALUES, ModuleType, nn.Module})
"""Classes whose values lead to nothing that a comparison reads."""
_NEVER_PATCHED = sys.stdlib_module_names | {"torch", "numpy", "fxlib"}


class Observations:
    """Derives facts from what instrumented code reports. Each method is named for an observer and gets its operands."""

    def __init__(self, record: Record, functions: ObservedFunctions, arguments: ArgumentAssumptions) -> None:
        self._record, self._functions, self._arguments = record, functions, arguments
        self._looked_up: dict[tuple[type, str], Any] = {}
        self._special_classes: set[type] = set()
        self.writer = ""
        """The first statement that may change something that `deep` has read; empty if none does."""

    def forget(self) -> None:
        """Drop what was found on classes, since during a capture it may be the capture's own functions."""
        self._looked_up.clear()

    def begun(self, function: FunctionType | None, scope: dict[str, Any], names: tuple[str, ...]) -> None:
        """Handle the first run of a function, which reads its globals, its closure and its defaults."""
        for name in names:
            value = scope.get(name, Mark.ABSENT)
            self._record.fact(Kind.ITEM, scope, name, value)
            if value is Mark.ABSENT:
                builtins = scope.get("__builtins__", {})
                table = builtins if is_a(builtins, dict) else vars(builtins)
                self._record.fact(Kind.ITEM, table, name, table.get(name, Mark.ABSENT))
        if function is None:
            return
        self._record.fact(Kind.CODE, function, "__code__", self._functions.swapped[function])
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

    # These methods handle what instructions read.

    def attribute(self, name: str, owner: Any) -> None:
        """Handle the read of an attribute."""
        kind = type(owner)
        if kind in STATELESS:
            return
        if issubclass(kind, VALUES):
            self._arguments.attribute(name, owner)
            return
        if kind is super:
            self._attribute_of_super(name, owner)
        elif kind is MethodType and name not in _OF_METHODS:
            self.attribute(name, owner.__func__)
        elif issubclass(kind, ModuleType):
            self._attribute_of_module(name, owner)
        elif issubclass(kind, type):
            self._attribute_of_class(name, owner)
        else:
            self._attribute_of_instance(name, owner)

    def _attribute_of_module(self, name: str, owner: ModuleType) -> None:
        if name in attributes_of(owner) or type(owner) is ModuleType:
            for each in (name,) if name in attributes_of(owner) else (name, "__getattr__"):
                self._record.fact(Kind.ATTRIBUTE, owner, each, attributes_of(owner).get(each, Mark.ABSENT))
        else:
            self._getter(name, owner)

    def _attribute_of_super(self, name: str, owner: Any) -> None:
        kind = owner.__self_class__
        self.bases(kind)
        order = kind.__mro__
        for base in order[order.index(owner.__thisclass__) + 1 :]:
            found = base.__dict__.get(name, Mark.ABSENT)
            if base.__flags__ & HEAP_TYPE:
                self._record.fact(Kind.CLASS, base, name, found)
            if found is not Mark.ABSENT:
                return

    def bases(self, kind: type) -> None:
        """Handle a read of what a class derives from."""
        if kind.__flags__ & HEAP_TYPE:
            self._record.fact(Kind.BASES, kind, None, kind.__mro__)

    def class_of(self, owner: Any) -> None:
        """Handle the read of an object's class, directly or to look up one of the object's attributes there."""
        kind = type(owner)
        if issubclass(kind, torch.Tensor):
            self._record.class_asked(owner)
        elif (
            kind.__flags__ & HEAP_TYPE
            and not issubclass(kind, (*VALUES, type))
            and id(owner) not in self._record.modules
            and self._record.knows(owner)
        ):
            self._record.fact(Kind.TYPE, owner, None, kind)

    def _attribute_of_class(self, name: str, owner: type) -> None:
        if name == "__dict__":
            self.asked(class_items, (owner,))
            return
        self.bases(owner)
        self.on_class(name, type(owner))  # where a property would take precedence
        for base in owner.__mro__:
            if base.__flags__ & HEAP_TYPE:
                found = base.__dict__.get(name, Mark.ABSENT)
                self._record.fact(Kind.CLASS, base, name, found)
                if found is not Mark.ABSENT:
                    return
        if type(owner) is not type or (name in _OF_CLASSES and owner.__flags__ & HEAP_TYPE):
            self._getter(name, owner)

    def attribute_of_super(self, name: str, function: Any, kind: Any, owner: Any) -> None:
        """Handle the read of an attribute of `super()`, which is one instruction since Python 3.12."""
        if function is super:
            self._attribute_of_super(name, super(kind, owner))

    def on_class(self, name: str, kind: type) -> Any:
        """Return what an object's class or a base class has under a name, and note a fact for each class searched."""
        if (kind, name) not in self._looked_up:
            self.bases(kind)
            found: Any = Mark.ABSENT
            for base in kind.__mro__:
                found = base.__dict__.get(name, Mark.ABSENT)
                if base.__flags__ & HEAP_TYPE:
                    self._record.fact(Kind.CLASS, base, name, found)
                if found is not Mark.ABSENT:
                    break
            self._looked_up[kind, name] = found
        return self._looked_up[kind, name]

    def _attribute_of_instance(self, name: str, owner: Any) -> None:
        kind = type(owner)
        if issubclass(kind, tuple) and not kind.__dictoffset__:
            return
        found = self.on_class(name, kind)
        self.on_class("__getattribute__", kind)
        self.class_of(owner)
        if not self._record.knows(owner):
            self._functions.discover_class(kind)
            return
        if found is not Mark.ABSENT and (hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")):
            self._described(name, owner, found)
            return
        if name == "__dict__":
            self._record.see(attributes_of(owner))
            return
        if kind.__dictoffset__:
            is_models = id(owner) in self._record.modules
            if is_models and (name == "training" or (name == "_flat_weights" and is_a(owner, nn.RNNBase))):
                return  # `training` is a condition for all these; the list is rebuilt when parameters are replaced
            value = attributes_of(owner).get(name, Mark.ABSENT)
            if is_models and is_a(value, torch.Tensor) and self._record.path_in_graph(value) is not None:
                self._record.fact(Kind.ATTRIBUTE, owner, name, Mark.TENSOR)
                return
            if value is Mark.ABSENT and is_a(found, functools.cached_property):
                self._record.fact(Kind.MEMO, attributes_of(owner), name, None)
                return
            self._record.fact(Kind.ATTRIBUTE, owner, name, value)
            if value is not Mark.ABSENT:
                return
        if found is Mark.ABSENT:
            self._missing(name, owner)

    def _described(self, name: str, owner: Any, descriptor: Any) -> None:
        """Handle a descriptor: the user's own runs observed, and any other is evaluated again before each run."""
        if name == "__dict__":
            self._record.see(attributes_of(owner))
        elif name != "__class__" and not any(is_observed(each.__code__) for each in functions_in(descriptor)):
            self._getter(name, owner)

    def _missing(self, name: str, owner: Any) -> None:
        if is_a(owner, nn.Module):
            tables = [attributes_of(owner).get(each, {}) for each in TABLES]
            holding = [table for table in tables if name in table]  # nn.Module ensures that it is at most one
            for table in holding or tables:
                value = table.get(name, Mark.ABSENT)
                self._record.fact(Kind.ITEM, table, name, Mark.TENSOR if is_a(value, torch.Tensor) else value)
        elif not is_torch(type(owner).__module__) and not self._looks_up_as_known(type(owner)):
            self._getter(name, owner)

    def _looks_up_as_known(self, kind: type) -> bool:
        """Return whether instances of a class look up attributes as Python does, or by functions that are observed."""
        by = [self.on_class(name, kind) for name in ("__getattribute__", "__getattr__")]
        return all(
            each is Mark.ABSENT
            or each is object.__getattribute__
            or any(is_observed(function.__code__) for function in functions_in(each))
            for each in by
        )

    def _getter(self, name: str, owner: Any) -> None:
        with suspended():
            value = getattr(owner, name, Mark.ABSENT)
        if not is_a(value, (MethodType, BuiltinFunctionType, *VALUES)):
            self._record.fact(Kind.GETTER, owner, name, value)

    def item(self, container: Any, key: Any, *_: Any) -> None:
        """Handle the read of an element, or of a slice if there is a third operand."""
        self._arguments.looked_up(key, container)
        if not self._record.knows(container):
            return
        if is_a(container, dict):
            self.class_of(container)
            try:
                self._entry_of(container, key)
            except TypeError:  # the key cannot be one
                return
        else:
            self._looked_into(container, "__getitem__")

    def _entry_of(self, table: dict[Any, Any], key: Any) -> Fact:
        return self._record.fact(Kind.ITEM, table, key, dict.get(table, key, Mark.ABSENT))

    def contained(self, key: Any, container: Any) -> None:
        """Handle a test of membership in a container."""
        self._arguments.looked_up(key, container)
        if is_a(container, dict):
            self.item(container, key)
        elif not is_a(container, VALUES):
            self._looked_into(container, "__contains__", "__iter__", "__getitem__")
            held = list(elements(container))  # often there are many, of a few classes that compare by no state
            kinds = set(map(type, held)) - STATELESS
            stateful = {kind for kind in kinds if _AT_ONCE.isdisjoint(kind.__mro__)}
            for each in held:
                if type(each) in stateful:
                    self._compared(each)
        self._compared(key)

    def _compared(self, value: Any) -> None:
        if not is_a(value, _NAMED):  # each of these equals only itself, whatever its name
            self.deep(value)

    def contents(self, value: Any, *_: Any) -> Fact | None:
        """Handle a read of the contents of a container."""
        return self._looked_into(value, "__iter__", "__len__", "__getitem__", "__reversed__", "keys")

    def _looked_into(self, value: Any, *methods: str) -> Fact | None:
        """Note everything that those of a value's methods that are not observed may read."""
        kind = type(value)
        if is_a(value, type):
            self._class_looked_into(value, *methods)
        if kind in STATELESS or is_a(value, (*VALUES, type, nn.Module, tuple)) or not self._record.knows(value):
            return None
        if kind.__module__ in ("weakref", "_weakrefset"):
            self.weak(value)
        self.class_of(value)
        self.special(kind)
        if is_container(value):
            held = contents_of(value)
            if is_a(value, dict):
                held = tuple((key, self._record.or_mark(each)) for key, each in held)
            return self._record.look_into(value, held)
        if hasattr(type(value), "__next__"):
            raise capture_error(
                f"the forward takes elements from a {type(value).__name__} that was there before, and changes it",
                hint="Make it in the forward, or take the elements before.",
            )
        for each in methods:
            found = self.on_class(each, kind)
            if found is not Mark.ABSENT and not any(is_observed(inner.__code__) for inner in functions_in(found)):
                self.deep(value)
                break
        return None

    def _class_looked_into(self, kind: type, *methods: str) -> None:
        """Note what those methods that a class has from its own class, as that of an enum, may read of it."""
        if type(kind) is type:
            return
        found = [each for each in (self.on_class(name, type(kind)) for name in methods) if each is not Mark.ABSENT]
        if any(not any(is_observed(inner.__code__) for inner in functions_in(each)) for each in found):
            self.class_contents(kind)

    def class_contents(self, kind: type, *, names: bool = False) -> None:
        """Handle a read of all that a class and its bases hold, but torch's; with `names`, also of what is there."""
        self.bases(kind)
        for base in kind.__mro__:
            if base.__flags__ & HEAP_TYPE and not is_torch(base.__module__):
                if names:
                    self.asked(class_items, (base,))
                for name, value in class_items(base):
                    self._record.fact(Kind.CLASS, base, name, value)
                    self.deep(value)

    def length(self, value: Any) -> None:
        """Handle the read of a container's length, or a test of whether it is empty."""
        if type(value) not in (list, dict, set, deque):
            self.contents(value)
        elif self._record.knows(value):
            self._record.count(value)

    def deep(self, value: Any, seen: set[int] | None = None) -> None:
        """Handle a read of all that a value leads to, except modules; of functions and classes, only names are read."""
        kind = type(value)
        if is_a(value, _NAMED):
            self._names(value)
            return
        if kind in STATELESS or is_a(value, (*VALUES, ModuleType, nn.Module)):
            return
        seen = set() if seen is None else seen
        if kind is Context:
            self.asked(context_items, (value,))
        if id(value) in seen or kind.__module__.partition(".")[0] in MACHINERY:
            return
        seen.add(id(value))
        self.class_of(value)
        self.special(kind)
        if kind.__module__ == "decimal":
            self._decimal_context()
        known = self._record.knows(value)
        if is_container(value) and known and (fact := self.contents(value)) is not None:
            fact.where = fact.where or self.writer
        for each in (*elements(value), *behind(value)):
            self._record.see(each) if known else None
            self.deep(each, seen)
        for name in slots_of(kind):
            if known:
                self._record.fact(Kind.GETTER, value, name, computed(value, name)).where = self.writer
            self.deep(computed(value, name), seen)
        if kind.__dictoffset__:
            held = attributes_of(value)
            if known:
                self._record.see(held)
            self.deep(held, seen)

    def hold(self, values: Iterable[Any]) -> None:
        """Handle objects that the forward has made, and whose parts must be the same in each run as now."""
        for value in values:
            self._record.see(value)
            self.deep(value, self._record.known_ids() - {id(value)})

    def _names(self, value: Any) -> None:
        """Note what the text of a class or a function is made from."""
        if is_a(value, type):
            self.special(type(value))
            self.attribute("__module__", value)
        self.attribute("__qualname__", value)

    def truth(self, value: Any) -> None:
        """Handle a branch on the truth of a value."""
        kind = type(value)
        if kind in STATELESS or issubclass(kind, VALUES):
            return
        if is_container(value):
            self.length(value)
        else:
            self._looked_into(value, "__bool__", "__len__")
        if kind.__flags__ & HEAP_TYPE and self.on_class("__bool__", kind) is Mark.ABSENT:
            self.on_class("__len__", kind)

    def special(self, kind: type) -> None:
        """Handle the class of an operand of an operator or a function in C, which looks up special methods there."""
        if kind in self._special_classes or not kind.__flags__ & HEAP_TYPE or is_fx(kind.__module__):
            return
        self._special_classes.add(kind)
        for base in kind.__mro__:
            if base.__flags__ & HEAP_TYPE and base is not nn.Module:
                for name, value in list(base.__dict__.items()):
                    if name.startswith("__") and callable(value):
                        self._record.fact(Kind.CLASS, base, name, value)
                if base.__module__.partition(".")[0] not in _NEVER_PATCHED:
                    for name in _OPERATORS - base.__dict__.keys():
                        self._record.fact(Kind.CLASS, base, name, Mark.ABSENT)

    def operands(self, *values: Any) -> None:
        """Handle the operands of an operator."""
        for value in values:
            if self._record.stand_ins is not None and is_a(value, torch.Tensor):
                self._record.method_of_tensors(*_OPERATORS)
            if type(value) not in STATELESS:
                self.deep(value)

    def _decimal_context(self) -> None:
        context = sys.modules["decimal"].getcontext
        self.asked(context, ())
        for name in ("prec", "rounding", "Emin", "Emax", "clamp"):
            self._getter(name, context())

    def imported(self, name: str, level: int, _: object) -> None:
        """Handle an import, which looks up modules by name."""
        if level:
            name = importlib.util.resolve_name("." * level + name, str(_observed_scope()["__package__"]))
        for end in (*(place for place, each in enumerate(name) if each == "."), len(name)):
            if name[:end] in sys.modules:
                self._entry_of(sys.modules, name[:end])

    def imported_by_name(self, name: str, *rest: Any) -> None:
        """Handle the import of a module by a function that takes its name."""
        package = next((each for each in rest if is_a(each, str)), None)
        with contextlib.suppress(ImportError, ValueError):  # the call itself will raise it
            self.imported(importlib.util.resolve_name(name, package), 0, None)

    def weak(self, value: Any) -> None:
        """Refuse to read a weakly held object: noting a fact about it would keep it alive beyond the program's use.

        The model's modules are kept alive in any case.
        """
        referent = value() if type(value) is weakref.ref else value
        if referent is not None and id(referent) not in self._record.modules and not is_a(referent, type):
            raise capture_error(
                "the forward asks a weak reference, and a graph would have to hold what that refers to",
                hint="Hold the object itself, or make what asks a leaf with wrap=.",
            )

    def signature(self, function: Any) -> None:
        """Handle the read of a function's signature."""
        if is_a(function, FunctionType):
            self._record.fact(Kind.CODE, function, "__code__", self._functions.swapped.get(function, function.__code__))
            fact = self._record.fact(Kind.DEFAULTS, function, function.__name__, None)
            fact.value = (function.__defaults__, function.__kwdefaults__)
            self.deep(function.__kwdefaults__)
            for name in ("__annotations__", "__signature__", "__wrapped__"):
                self.attribute(name, function)

    def formatted(self, value: Any, *_: Any) -> None:
        """Handle the making of text from a value."""
        self.operands(value)
        for each in (value, *elements(value)):
            kind = type(each)
            if is_array(each) or issubclass(kind, torch.Tensor):
                self.asked(print_settings, ())
            elif kind.__flags__ & HEAP_TYPE and not issubclass(kind, VALUES):
                self._names(kind)
                self.attribute("__name__", kind)

    def entered(self, manager: Any) -> None:
        """Handle the entry of a context manager."""
        self._functions.discover_class(type(manager))
        if may_swallow(manager):
            raise capture_error(
                f"errors are suppressed or replaced here, by {type(manager).__name__}, and a graph cannot catch what "
                "only a run raises",
                hint="Check before what may fail, or catch it outside of the forward.",
            )

    def matched(self, subject: Any, kind: Any, names: tuple[str, ...]) -> None:
        """Handle the match of a value against a class pattern."""
        if is_a(subject, Proxy):
            self._arguments.of_traced(isinstance, subject, (kind,))
        self.instance_of(subject, kind)
        for name in (*names, *getattr(kind, "__match_args__", ())):
            self.attribute(name, subject)

    def instance_of(self, value: Any, kinds: Any) -> None:
        """Handle an `isinstance` test; further classes may be registered with an abstract class later."""
        if is_a(value, torch.Tensor) and torch.Tensor in classes_in(kinds):
            return
        self.class_of(value)
        if not is_a(value, VALUES):
            self.bases(type(value))
        for kind in classes_in(kinds):
            asks = self.on_class("__instancecheck__", type(kind))
            if asks is type.__dict__["__instancecheck__"] or is_torch(kind.__module__) or is_a(value, VALUES):
                continue
            known = self._record.knows(value) or type(value) in STATELESS
            question = (isinstance, (value, kind)) if known else (issubclass, (type(value), kind))
            self.asked(*question)

    def asked(self, function: Any, operands: tuple[Any, ...]) -> None:
        """Handle a call of a function without effects, which is called again before each run."""
        with suspended(), contextlib.suppress(Exception):  # the call itself will raise it
            self._record.fact(Kind.QUESTION, function, operands, function(*operands))

    # These methods handle what instructions write.

    def stored(self, name: str, owner: Any) -> None:
        """Handle the write or deletion of an attribute."""
        if id(owner) in self._record.modules:  # these are watched as a whole
            self._record.written.setdefault((id(owner), name), source.here())
            return
        if not self._record.knows(owner) or is_a(owner, VALUES):
            return
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

    def item_stored(self, container: Any, key: Any, *_: Any) -> None:
        """Handle the write or deletion of an element."""
        if not self._record.knows(container) or is_a(container, VALUES):
            return
        fact = self._entry_of(container, key) if is_a(container, dict) else self.contents(container)
        if fact is not None:
            fact.where = fact.where or source.here()

    def global_stored(self, name: str) -> None:
        """Handle the write of a global variable."""
        fact = self._entry_of(_observed_scope(), name)
        fact.where = fact.where or source.here()

    def cell_stored(self, name: str, cell: CellType) -> None:
        """Handle the write of a closure's variable; closures that the forward itself made do not count."""
        if (fact := self._record.known_fact(Kind.CELL, cell, name)) is not None:
            fact.where = fact.where or source.here()

    # These methods handle comparisons by identity.

    def identity(self, one: Any, other: Any) -> None:
        """Handle a comparison of two values by identity."""
        self._arguments.identity(one, other)

    def none(self, value: Any) -> None:
        """Handle a comparison of a value with None."""
        self._arguments.identity(value, None)


def _observed_scope() -> dict[str, Any]:
    """Return the global variables of the function being observed."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_instrumented(frame.f_code):
        frame = frame.f_back
    return {} if frame is None else frame.f_globals
