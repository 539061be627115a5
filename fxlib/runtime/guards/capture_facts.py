"""Facts about Python objects that a capture used, and checks of whether they still hold.

A fact is about one place: an attribute, an entry of a dict, the contents of a list. Since the places on the way to it
are facts themselves, checked by identity, a program that found all of them unchanged would find the same again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from fxlib.runtime.guards.dict_entries import Mark


class Kind(Enum):
    """The kind of place in which a fact was read."""

    ATTRIBUTE = "attribute of an object's own"
    ITEM = "entry of a dict"
    CLASS = "attribute of a class"
    TYPE = "class of an object"
    CELL = "variable of a closure"
    CONTENTS = "what a container holds"
    LENGTH = "how much a container holds"
    GETTER = "attribute that is computed"
    DEFAULTS = "default arguments of a function"
    QUESTION = "what a function answers"
    VALUE = "the elements of a tensor"
    MEMO = "entry of a cache that the first run fills"
    BASES = "bases of a class"
    CODE = "code of a function"


GRAD_MODE = frozenset({"is_grad_enabled", "set_grad_enabled", "enable_grad"})
"""Functions by which a forward may behave differently without gradients, besides not recording them."""
SCALARS = (bool, int, float, complex, str, bytes, type(None), range, slice)
REBOUND = (Kind.ATTRIBUTE, Kind.ITEM, Kind.CLASS, Kind.CELL, Kind.DEFAULTS, Kind.BASES)
IDENTICAL_IF_EQUAL = frozenset({type, FunctionType, str})
"""Types of which equal objects are the same, or have no identity of their own."""
_DEFAULTS = attrgetter("__defaults__", "__kwdefaults__")


@dataclass(eq=False, slots=True)
class Fact:
    """The value that was found in one place when a forward was captured."""

    kind: Kind
    owner: Any
    key: Any
    value: Any
    where: str = ""
    """The statement of the program that writes to that place, if one does."""
    recall: Callable[[], Any] | None = None
    """A function that asks a cache written in C for an answer that it has; entries of such a cache show no values."""
    signs: tuple[torch.Tensor, torch.Tensor | None] | None = None
    """The elements that were found in a tensor and, if zeros are among them, their signs; None until they are asked."""
    varies: bool = False
    """Whether an equal object has been in the value's place since."""

    def now(self) -> Any:
        """Return the value that is there now."""
        return _READERS[self.kind](self.owner, self.key)

    def holds(self) -> bool:
        """Return whether the same value is there now, or an equal one if it has no identity of its own."""
        if self.kind is Kind.MEMO:
            return self._is_filled()
        now = self.now()
        if self.kind is Kind.CONTENTS and is_array(self.owner) and is_array(self.value):
            return _same_array(now, self.value)
        return same(now, self.value) or (self.kind is Kind.VALUE and self._has_same_elements(now))

    def _has_same_elements(self, now: torch.Tensor) -> bool:
        """Return whether a tensor has the elements that were found; zeros of the other sign are others."""
        value = self.value
        if not (now.dtype is value.dtype and now.device == value.device and torch.equal(now, value)):
            return False
        if self.signs is None or self.signs[0] is not value:
            numbers = _numbers(value)
            signed = numbers.is_floating_point() and bool((numbers == 0).any())
            self.signs = value, numbers.signbit() if signed else None
        signs = self.signs[1]
        return signs is None or torch.equal(_numbers(now).signbit(), signs)

    def _is_filled(self) -> bool:
        """Return whether a run has filled the entry with the captured result, and hold the fact to that entry then."""
        if (entry := self.now()) is Mark.ABSENT or not same(self.recall() if self.recall else entry, self.value):
            return False
        self.kind, self.value = Kind.ITEM, entry
        return True

    def restore(self) -> None:
        """Put back the value that was there."""
        if self.kind is Kind.MEMO:
            dict.pop(self.owner, self.key, None)
        if self.kind is Kind.CONTENTS:
            _refill(self.owner, self.value)
        elif self.kind is Kind.CELL:
            if self.value is Mark.ABSENT:
                del self.owner.cell_contents
            else:
                self.owner.cell_contents = self.value
        elif self.kind in (Kind.ATTRIBUTE, Kind.ITEM):
            table = self.owner if self.kind is Kind.ITEM else attributes_of(self.owner)
            if self.value is Mark.ABSENT:
                table.pop(self.key, None)
            elif self.value is not Mark.TENSOR:
                table[self.key] = self.value
        elif self.kind is Kind.TYPE:
            object.__setattr__(self.owner, "__class__", self.value)
        elif self.kind is Kind.CLASS:
            _put_in_class(self.owner, self.key, self.value)
        elif self.kind in (Kind.GETTER, Kind.CODE) and self.value is not Mark.ABSENT:
            setattr(self.owner, self.key, self.value)
        elif self.kind is Kind.DEFAULTS:
            self.owner.__defaults__, self.owner.__kwdefaults__ = self.value

    def __str__(self) -> str:
        owner = self.owner.__name__ if isinstance(self.owner, type) else type(self.owner).__name__
        if self.kind is Kind.ITEM or self.kind is Kind.CONTENTS:
            return f"what a {owner} holds" + (f" under {self.key!r}" if self.kind is Kind.ITEM else "")
        if self.kind is Kind.MEMO:
            return f"what is cached under {self.key!r}"
        if self.kind is Kind.LENGTH:
            return f"the length of a {owner}"
        if self.kind is Kind.TYPE:
            return f"the class of a {getattr(self.value, '__name__', owner)}"
        if self.kind in (Kind.CELL, Kind.DEFAULTS):
            return f"{self.kind.value} ({self.key})"
        if self.kind is Kind.QUESTION:
            return f"what {getattr(self.owner, '__name__', owner)}() answers"
        if self.kind is Kind.VALUE:
            return "the elements of a tensor that the forward asked for"
        return f"{getattr(self.owner, '__name__', owner)}.{self.key}"


class Change(NamedTuple):
    """A difference from the capture: how to put back what was found, and how to change it again."""

    undo: Callable[[], object]
    redo: Callable[[], object]


def changed_entry(table: dict[Any, Any], key: Any, value: Any) -> Change:
    """Return the change of an entry of a dict that was `value` at capture, or `Mark.ABSENT`."""
    now = dict.get(table, key, Mark.ABSENT)
    return Change(lambda: _put(table, key, value), lambda: _put(table, key, now))


def _put(table: dict[Any, Any], key: Any, value: Any) -> None:
    if value is Mark.ABSENT:
        table.pop(key, None)
    else:
        table[key] = value


def change_of(fact: Fact) -> Change:
    """Return how to undo, and how to redo, the change because of which a fact does not hold."""
    now, undo = fact.now(), fact.restore
    if fact.kind is Kind.LENGTH:  # nobody has looked at the contents
        held = contents_of(fact.owner)
        undo = functools.partial(_refill, fact.owner, _of_length(held, fact.value, type(fact.owner)))
        return Change(undo, functools.partial(_refill, fact.owner, held))
    if fact.kind is Kind.CONTENTS and isinstance(fact.owner, dict):
        tensors = {key: value for key, value in dict.items(fact.owner) if isinstance(value, torch.Tensor)}
        was = [(key, tensors.get(key, value) if value is Mark.TENSOR else value) for key, value in fact.value]
        undo = functools.partial(_refill, fact.owner, was)
    redo = Fact(fact.kind, fact.owner, fact.key, now).restore
    if fact.kind is Kind.GETTER:  # a computed value may follow from other facts, and cannot be set
        return Change(functools.partial(_if_possible, undo), functools.partial(_if_possible, redo))
    return Change(undo, redo)


def _if_possible(put: Callable[[], object]) -> None:
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        put()


def _of_length(held: Any, length: int, kind: type) -> Any:
    """Return contents of another length, for a container of which only the length counts."""
    more = range(length - len(held))
    if issubclass(kind, dict):
        return [*held[:length], *((object(), None) for _ in more)]
    return [*held][:length] + [object() for _ in more]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentFact:
    """A condition on an argument of the forward, or on a part of one.

    Args:
        name: the argument; empty for the captured module itself.
        steps: how to get from it to the part: attributes ("getattr", name), elements ("getitem", key), and calls of
            methods that only read ("get", arguments).
        test: "is not", "isinstance", "type is", "lacks" (an attribute), or "equals".
        value: the value to which the argument is held: one object, a class, or a size.
        other: for "is not", another argument with its steps, in place of `value`.
    """

    name: str
    steps: tuple[tuple[str, Any], ...]
    test: str
    value: Any
    other: tuple[str, tuple[tuple[str, Any], ...]] | None = None

    def broken(self, arguments: Mapping[str, Any]) -> str:
        """Return in words how the argument differs; empty if it does not."""
        try:
            found = follow(arguments[self.name], self.steps)
            value = self.value if self.other is None else follow(arguments[self.other[0]], self.other[1])
        except Exception:  # noqa: BLE001 - the forward itself shall meet whatever an argument raises
            return f"{self._location()} is not there"
        if self.test == "equals" and found != value:
            return f"{self._location()} is {found!r}, and was {value!r} at capture"
        if self.test == "lacks" and hasattr(found, value):
            return f"{self._location()} has an attribute {value}, and was taken for a tensor at capture"
        if self.test == "is not" and found is value:
            known = "another argument" if self.other is not None else repr(value)
            return f"{self._location()} is {known}, and was taken for a tensor at capture: see concrete_args="
        if (self.test == "isinstance" and not isinstance(found, value)) or (
            self.test == "type is" and type(found) is not value
        ):
            return (
                f"{self._location()} is of type {type(found).__name__}, and was taken for a "
                f"{value.__name__} at capture: see concrete_args="
            )
        return ""

    def _location(self) -> str:
        forms = {"getattr": ".{}", "getitem": "[{!r}]"}
        path = self.name + "".join(forms.get(step, ".get{}").format(key) for step, key in self.steps)
        return f"the argument {path}" if self.name else f"the model's {path[1:]}"


def follow(value: Any, steps: Iterable[tuple[str, Any]]) -> Any:
    """Return the part of a value to which steps lead, as those of an `ArgumentFact`."""
    for step, key in steps:
        if step == "getattr":
            value = getattr(value, key)
        elif step == "getitem":
            value = value[key]
        else:
            value = getattr(value, step)(*key)
    return value


def same(now: Any, value: Any) -> bool:
    """Return whether a value is what it was: the same object, or an equal one of a kind without a notable identity."""
    if now is value:
        return True
    if value is Mark.TENSOR:
        return isinstance(now, torch.Tensor)
    kind = type(value)
    if type(now) is not kind:
        return False
    if issubclass(kind, tuple):
        return len(now) == len(value) and all(map(same, now, value))
    if kind in (range, slice):
        equal: Any = all(same(getattr(now, each), getattr(value, each)) for each in ("start", "stop", "step"))
    elif kind in SCALARS:
        equal = now == value and (kind not in (float, complex) or repr(now) == repr(value))
    elif kind is MethodType:
        equal = now.__func__ is value.__func__ and now.__self__ is value.__self__
    elif kind is frozenset:
        identical = IDENTICAL_IF_EQUAL.issuperset(map(type, (*now, *value)))
        equal = now == value and (identical or _same_elements_of_sets(now, value))
    elif kind.__module__ == "numpy" and hasattr(value, "tobytes") and not hasattr(value, "ctypes"):  # a number
        equal = now.dtype == value.dtype and now.tobytes() == value.tobytes()
    else:
        equal = kind in (torch.dtype, torch.device) and now == value
    return bool(equal)


def _same_elements_of_sets(now: frozenset[Any], value: frozenset[Any]) -> bool:
    found = {each: each for each in now}
    return all(each in found and same(found[each], each) for each in value)


def _same_array(now: Any, value: Any) -> bool:
    return bool(now.shape == value.shape and now.dtype == value.dtype and now.tobytes() == value.tobytes())


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, each complex one as two numbers."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return the dict in which an object keeps its own attributes."""
    found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    return found


def class_items(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the attributes that a class has itself, with their names."""
    return tuple(kind.__dict__.items())


def context_items(context: Context | None = None) -> tuple[tuple[ContextVar[Any], Any], ...]:
    """Return the context variables that are set in a context, by default the present one, with their values."""
    return tuple((copy_context() if context is None else context).items())


def print_settings() -> tuple[tuple[str, Any], ...]:
    """Return the settings of torch and NumPy by which tensors and arrays become text."""
    numpy = sys.modules.get("numpy")
    others = {} if numpy is None else numpy.get_printoptions()
    return (*vars(torch._tensor_str.PRINT_OPTS).items(), *others.items())


def contents_of(container: Any) -> Any:
    """Return the contents of a container, to be compared with `same`; None if the value is no container."""
    if isinstance(container, OrderedDict):  # it keeps an order of its own
        return tuple(OrderedDict.items(container))
    if isinstance(container, dict):
        return tuple(dict.items(container))
    if isinstance(container, (list, deque)):
        return tuple(container)
    if isinstance(container, set):
        return frozenset(container)
    if isinstance(container, (bytearray, array, memoryview)):
        return bytes(container) if isinstance(container, bytearray) else container.tobytes()
    if is_array(container):
        return tuple(container.flat) if container.dtype == object else container.copy()
    return None


def is_container(value: Any) -> bool:
    """Return whether a value's contents may change, and `contents_of` knows them."""
    return issubclass(type(value), (list, dict, set, deque, bytearray, array, memoryview)) or is_array(value)


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array, without loading NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def is_memory(value: Any) -> bool:
    """Return whether a value has memory of its own that a tensor may share."""
    return issubclass(type(value), (bytearray, array, memoryview)) or is_array(value)


def _refill(container: Any, value: Any) -> None:
    if isinstance(container, memoryview):
        container.cast("B")[:] = value
    elif isinstance(container, array):
        container[:] = array(container.typecode, value)
    elif is_array(container) and container.dtype == object:
        for index, each in enumerate(value):
            container.flat[index] = each
    elif isinstance(container, (dict, set)):
        container.clear()
        container.update(value)
    elif isinstance(container, deque):
        container.clear()
        container.extend(value)
    elif is_array(container):
        container[...] = value
    else:
        container[:] = value


def _put_in_class(owner: type, key: str, value: Any) -> None:
    if value is not Mark.ABSENT:
        type.__setattr__(owner, key, value)
    elif key in owner.__dict__:
        type.__delattr__(owner, key)


def _of_class(owner: type, key: str) -> Any:
    return owner.__dict__.get(key, Mark.ABSENT)


def _of_cell(owner: Any, _: Any) -> Any:
    try:
        return owner.cell_contents
    except ValueError:
        return Mark.ABSENT


def computed(owner: Any, key: str) -> Any:
    """Return an attribute with the value that the object itself gives for it."""
    try:
        return getattr(owner, key)
    except AttributeError:
        return Mark.ABSENT


def _answered(owner: Callable[..., Any], key: tuple[Any, ...]) -> Any:
    return owner(*key)


_READERS: Mapping[Kind, Callable[[Any, Any], Any]] = {
    Kind.ATTRIBUTE: lambda owner, key: attributes_of(owner).get(key, Mark.ABSENT),
    Kind.ITEM: lambda owner, key: dict.get(owner, key, Mark.ABSENT),
    Kind.CLASS: _of_class,
    Kind.TYPE: lambda owner, _: type(owner),
    Kind.CELL: _of_cell,
    Kind.CONTENTS: lambda owner, _: contents_of(owner),
    Kind.LENGTH: lambda owner, _: len(owner),
    Kind.GETTER: computed,
    Kind.DEFAULTS: lambda owner, _: _DEFAULTS(owner),
    Kind.QUESTION: _answered,
    Kind.VALUE: lambda owner, _: owner.detach(),
    Kind.MEMO: lambda owner, key: dict.get(owner, key, Mark.ABSENT),
    Kind.BASES: lambda owner, _: owner.__mro__,
    Kind.CODE: lambda owner, _: owner.__code__,
}
