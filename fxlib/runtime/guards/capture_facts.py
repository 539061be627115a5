"""Facts of Python's that a capture used, and whether they are so still.

A fact is about one place: an attribute, an entry of a dict, what a list holds. As the places on the way to it are facts
themselves, checked by identity, a program that found all of them unchanged would find the same again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from operator import attrgetter, eq, is_
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph, Node

from fxlib.runtime.guards.dict_entries import DictEntries, Mark
from fxlib.runtime.guards.export_guards import GuardedCodeGen


class Kind(Enum):
    """Where a fact was read."""

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
"""Functions by which a forward behaves otherwise where no gradients are recorded, besides recording none."""
SCALARS = (bool, int, float, complex, str, bytes, type(None), range, slice)
_REBOUND = (Kind.ATTRIBUTE, Kind.ITEM, Kind.CLASS, Kind.CELL, Kind.DEFAULTS)
_DEFAULTS = attrgetter("__defaults__", "__kwdefaults__")


@dataclass(eq=False, slots=True)
class Fact:
    """What was found in one place when a forward was captured."""

    kind: Kind
    owner: Any
    key: Any
    value: Any
    where: str = ""
    """The statement of the program that writes there, if one does."""
    recall: Callable[[], Any] | None = None
    """Asks a cache of C's for an answer that is there: its entries show only that they are."""

    def now(self) -> Any:
        """Return what is there now."""
        return _READERS[self.kind](self.owner, self.key)

    def holds(self) -> bool:
        """Whether what is there now is what was there, or equal to it, where it has no identity of its own."""
        if self.kind is Kind.MEMO:
            return self._is_filled()
        now = self.now()
        if self.kind is Kind.CONTENTS and is_array(self.owner) and is_array(self.value):
            return _same_array(now, self.value)
        return same(now, self.value) or (self.kind is Kind.VALUE and _same_elements(now, self.value))

    def _is_filled(self) -> bool:
        """Whether a run has filled the entry with what the capture computed: from then on it is that very entry."""
        if (entry := self.now()) is Mark.ABSENT or not same(self.recall() if self.recall else entry, self.value):
            return False
        self.kind, self.value = Kind.ITEM, entry
        return True

    def restore(self) -> None:
        """Put back what was there."""
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
    """A difference from what was found at capture: how to put back what was found, and how to change it again."""

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


def _change(fact: Fact) -> Change:
    """Return what is to be done about a fact that does not hold."""
    now, undo = fact.now(), fact.restore
    if fact.kind is Kind.LENGTH:  # nobody has looked at what it held
        held = contents_of(fact.owner)
        undo = functools.partial(_refill, fact.owner, _of_length(held, fact.value, type(fact.owner)))
        return Change(undo, functools.partial(_refill, fact.owner, held))
    if fact.kind is Kind.CONTENTS and isinstance(fact.owner, dict):
        tensors = {key: value for key, value in dict.items(fact.owner) if isinstance(value, torch.Tensor)}
        was = [(key, tensors.get(key, value) if value is Mark.TENSOR else value) for key, value in fact.value]
        undo = functools.partial(_refill, fact.owner, was)
    redo = Fact(fact.kind, fact.owner, fact.key, now).restore
    if fact.kind is Kind.GETTER:  # what is computed may follow from other facts, and cannot be set
        return Change(functools.partial(_if_possible, undo), functools.partial(_if_possible, redo))
    return Change(undo, redo)


def _if_possible(put: Callable[[], object]) -> None:
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        put()


def _of_length(held: Any, length: int, kind: type) -> Any:
    """Return contents of another length, of a container of which only the length counts."""
    more = range(length - len(held))
    if issubclass(kind, dict):
        return [*held[:length], *((object(), None) for _ in more)]
    return [*held][:length] + [object() for _ in more]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentFact:
    """What an argument of the forward, or a part of one, must be or must not be.

    Args:
        name: the argument; empty for the captured module itself.
        steps: how to get from it to the part: attributes ("getattr", name), elements ("getitem", key), and calls of
            methods that only read ("get", arguments).
        test: "is not", "isinstance", "type is", "lacks" (an attribute), or "equals".
        value: what the argument is held to: one object, a class, or a size.
        other: for "is not", another argument with its steps, in place of `value`.
    """

    name: str
    steps: tuple[tuple[str, Any], ...]
    test: str
    value: Any
    other: tuple[str, tuple[tuple[str, Any], ...]] | None = None

    def broken(self, arguments: Mapping[str, Any]) -> str:
        """Return what about the argument is otherwise, in words; empty if nothing is."""
        try:
            found = follow(arguments[self.name], self.steps)
            value = self.value if self.other is None else follow(arguments[self.other[0]], self.other[1])
        except Exception:  # noqa: BLE001 - whatever an argument raises, the forward itself shall meet it
            return f"{self._place()} is not there"
        if self.test == "equals" and found != value:
            return f"{self._place()} is {found!r}, and was {value!r} at capture"
        if self.test == "lacks" and hasattr(found, value):
            return f"{self._place()} has an attribute {value}, and was taken for a tensor at capture"
        if self.test == "is not" and found is value:
            known = "another argument" if self.other is not None else repr(value)
            return f"{self._place()} is {known}, and was taken for a tensor at capture: see concrete_args="
        if (self.test == "isinstance" and not isinstance(found, value)) or (
            self.test == "type is" and type(found) is not value
        ):
            return (
                f"{self._place()} is of type {type(found).__name__}, and was taken for a "
                f"{value.__name__} at capture: see concrete_args="
            )
        return ""

    def _place(self) -> str:
        forms = {"getattr": ".{}", "getitem": "[{!r}]"}
        path = self.name + "".join(forms.get(step, ".get{}").format(key) for step, key in self.steps)
        return f"the argument {path}" if self.name else f"the model's {path[1:]}"


def follow(value: Any, steps: Iterable[tuple[str, Any]]) -> Any:
    """Return the part of a value that steps, as of an `ArgumentFact`, lead to."""
    for step, key in steps:
        if step == "getattr":
            value = getattr(value, key)
        elif step == "getitem":
            value = value[key]
        else:
            value = getattr(value, step)(*key)
    return value


def same(now: Any, value: Any) -> bool:
    """Whether a value is what it was: the same object, or an equal one of a kind that has no identity to speak of."""
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
        found = {each: each for each in now}
        equal = len(now) == len(value) and all(each in found and same(found[each], each) for each in value)
    elif kind.__module__ == "numpy" and hasattr(value, "tobytes") and not hasattr(value, "ctypes"):  # a number
        equal = now.dtype == value.dtype and now.tobytes() == value.tobytes()
    else:
        equal = kind in (torch.dtype, torch.device) and now == value
    return bool(equal)


def _same_array(now: Any, value: Any) -> bool:
    return bool(now.shape == value.shape and now.dtype == value.dtype and now.tobytes() == value.tobytes())


def _same_elements(now: torch.Tensor, value: torch.Tensor) -> bool:
    return now.dtype == value.dtype and now.device == value.device and torch.equal(now, value)


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return the dict in which an object keeps attributes of its own."""
    found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    return found


def contents_of(container: Any) -> Any:
    """Return what a container holds, to be compared with `same`; None of what is no container."""
    if isinstance(container, OrderedDict):  # which keeps an order of its own
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
    """Whether what a value holds may change, and `contents_of` knows it."""
    return issubclass(type(value), (list, dict, set, deque, bytearray, array, memoryview)) or is_array(value)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's, without loading NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


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
    """Return an attribute as an object answers for it."""
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


@dataclass(slots=True)
class _Column:
    """The facts of one kind: what `read` finds of each owner, one pass in C, has to be the value beside it."""

    read: Callable[..., Any]
    matches: Callable[[Any, Any], Any] = is_
    is_flat: bool = False
    """Whether `read` finds several values of each owner, which stand one after another in `values`."""
    owners: list[Any] = field(default_factory=list)
    keys: list[Any] | None = None
    """The second argument of `read`, where it takes one."""
    values: list[Any] = field(default_factory=list)

    def holds(self) -> bool:
        """Whether each owner's value is as it was, to the letter."""
        found = map(self.read, self.owners) if self.keys is None else map(self.read, self.owners, self.keys)
        return all(map(self.matches, chain.from_iterable(found) if self.is_flat else found, self.values))


class _Columns:
    """The facts of the most frequent kinds, laid out so that a few passes in C compare them all."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self._entries = DictEntries()
        self._types = _Column(type)
        self._bases = _Column(attrgetter("__mro__"))
        self._codes = _Column(attrgetter("__code__"))
        self._lengths = _Column(len, matches=eq)
        self._elements = _Column(iter, is_flat=True)
        self._dict_values = _Column(dict.values, is_flat=True)
        self._tensors = _Column(dict.get, matches=isinstance, keys=[])
        self._defaults = _Column(attrgetter("__defaults__"))
        self._keyword_defaults = _Column(attrgetter("__kwdefaults__"))
        self._cells = _Column(attrgetter("cell_contents"))
        self._others: list[Fact] = []
        for fact in facts:
            self._place(fact)
        columns = (
            *(self._types, self._bases, self._codes, self._lengths, self._elements, self._dict_values, self._tensors),
            *(self._defaults, self._keyword_defaults, self._cells),
        )
        self._used = [each for each in columns if each.owners]

    def hold(self) -> bool:
        """Whether all facts hold to the letter: the same objects."""
        if not self._entries.holds():
            return False
        try:
            for each in self._used:
                if not each.holds():
                    return False
        except ValueError:  # the cell of a closure is empty
            return False
        return not self._others or all(each.holds() for each in self._others)

    def _place(self, fact: Fact) -> None:
        """Add a fact where it is compared soonest."""
        kind, owner, value = fact.kind, fact.owner, fact.value
        if kind in (Kind.ATTRIBUTE, Kind.ITEM, Kind.CLASS):
            self._place_entry(fact)
        elif kind in (Kind.TYPE, Kind.BASES, Kind.CODE, Kind.LENGTH):
            columns = {
                Kind.TYPE: self._types,
                Kind.BASES: self._bases,
                Kind.CODE: self._codes,
                Kind.LENGTH: self._lengths,
            }
            _add(columns[kind], owner, value)
        elif kind is Kind.CONTENTS and isinstance(owner, dict):
            self._place_dict(owner, value)
        elif kind is Kind.CONTENTS and isinstance(owner, (list, deque)):
            _add(self._lengths, owner, len(value))
            if value:  # of an empty one, the length says all
                _add(self._elements, owner, *value)
        elif kind is Kind.DEFAULTS:
            _add(self._defaults, owner, value[0])
            _add(self._keyword_defaults, owner, value[1])
        elif kind is Kind.CELL and value is not Mark.ABSENT:
            _add(self._cells, owner, value)
        else:
            self._others.append(fact)

    def _place_dict(self, owner: dict[Any, Any], items: Sequence[tuple[Any, Any]]) -> None:
        _add(self._lengths, owner, len(items))
        if not items:
            return
        _add(self._elements, owner, *(key for key, _ in items))
        if not _has_tensors(items):
            _add(self._dict_values, owner, *(held for _, held in items))
            return
        for key, held in items:
            self._place_entry(Fact(Kind.ITEM, owner, key, held))

    def _place_entry(self, fact: Fact) -> None:
        if fact.kind is Kind.ITEM:
            table = fact.owner
        elif fact.kind is Kind.CLASS:
            (table,) = gc.get_referents(fact.owner.__dict__)  # the dict itself, behind its proxy
        else:
            table = attributes_of(fact.owner)
        if fact.value is Mark.TENSOR:
            assert self._tensors.keys is not None  # noqa: S101 - made above
            self._tensors.keys.append(fact.key)
            _add(self._tensors, table, torch.Tensor)
        else:
            self._entries.add(table, fact.key, fact.value)


def _add(column: _Column, owner: Any, *values: Any) -> None:
    column.owners.append(owner)
    column.values += values


class Facts:
    """All facts of one capture."""

    def __init__(
        self,
        facts: Sequence[Fact] = (),
        arguments: Sequence[ArgumentFact] = (),
        *,
        cached_calls: Sequence[Callable[[], Any]] = (),
    ) -> None:
        """Watch these facts, of which each holds now.

        Args:
            facts: facts about objects of the program.
            arguments: facts about the arguments of the forward.
            cached_calls: the calls by which the forward asks caches for results that are there.
        """
        self._cached_calls = cached_calls
        self.arguments = tuple(each for each in arguments if each.name)
        self._state = tuple(each for each in arguments if not each.name)
        self._facts = tuple(facts)
        self._columns: _Columns | None = None

    @classmethod
    def unread(cls, modules: Iterable[nn.Module], graph: Graph | None = None) -> Facts:
        """Return what to watch where nobody knows what the forward has read: numbers, flags and texts of modules.

        No argument of the graph may be None, True or False, but those that it checks itself.
        """
        known = [each for each in modules if not _is_machinery(type(each).__module__)]
        held = [(each, name, value) for each in known for name, value in vars(each).items() if name != "training"]
        facts = [Fact(Kind.ATTRIBUTE, *each) for each in held if isinstance(each[2], (*SCALARS, tuple))]
        nodes: Iterable[Node] = () if graph is None or isinstance(graph._codegen, GuardedCodeGen) else graph.nodes
        inputs = [node for node in nodes if node.op == "placeholder" and not any(map(_asserts, node.users))]
        arguments = [
            ArgumentFact(name=str(node.target).lstrip("*"), steps=(), test="is not", value=value)
            for node in inputs
            for value in (None, True, False)
        ]
        return cls(facts, arguments)

    def joined(self, other: Facts) -> Facts:
        """Return the facts of both."""
        arguments = (*self.arguments, *self._state)
        cached_calls = (*self._cached_calls, *other._cached_calls)
        return Facts((*self._facts, *other._facts), arguments, cached_calls=cached_calls)

    def ask_caches(self) -> None:
        """Ask caches as the forward does: they count that, and forget first what was not asked for longest."""
        for ask in self._cached_calls:
            ask()

    def __len__(self) -> int:
        return len(self._facts)

    def broken(self, module: nn.Module) -> str:
        """Return which fact does not hold now, in words; empty if all do.

        Args:
            module: the captured module, of whose tensors some are known not to be None.
        """
        for state in self._state:
            if broken := state.broken({"": module}):
                return broken
        if self._columns is None:
            self._columns = _Columns(self._facts)
        if self._columns.hold():
            return ""
        for fact in self._facts:
            if not fact.holds():
                return f"{fact} is not what it was at capture"
            is_full = fact.kind is Kind.CONTENTS and not (isinstance(fact.owner, dict) and _has_tensors(fact.value))
            if is_full or (fact.kind in _REBOUND and fact.value is not Mark.TENSOR):
                fact.value = fact.now()  # an equal value: compared by identity from now on
        self._columns = None
        return ""

    def changes(self) -> list[Change]:
        """Return what differs from what was found at capture, but for code, which a capture replaces for its time."""
        kept = (Kind.MEMO, Kind.CODE)
        return [_change(fact) for fact in self._facts if fact.kind not in kept and not fact.holds()]

    def misfit(self, arguments: Mapping[str, Any]) -> str:
        """Return which argument is not as the graph takes it to be, in words; empty if all are."""
        return next(filter(None, (each.broken(arguments) for each in self.arguments)), "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Facts:
        """Return the same facts about whatever was copied already, and about the rest as it is."""

        def copied(value: Any) -> Any:
            return memo.get(id(value), value)

        facts = [copy.copy(each) for each in self._facts]
        for each in facts:
            each.owner = copied(each.owner)
            each.value = _renamed(each.value, copied)
        return Facts(facts, (*self.arguments, *self._state), cached_calls=self._cached_calls)


def names_grad_mode(modules: Iterable[nn.Module]) -> bool:
    """Whether code of the modules' classes names a function that asks for, or sets, whether gradients are recorded."""
    kinds = {base for each in modules for base in type(each).__mro__ if not base.__module__.startswith("torch.")}
    functions = [value for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)]
    return any(not GRAD_MODE.isdisjoint(each.__code__.co_names) for each in functions)


def _is_machinery(module: str) -> bool:
    """Whether modules of a class that is defined there keep what has nothing to do with what they compute."""
    return module.startswith("torch.") and not module.startswith("torch.nn.modules.")


def _asserts(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")


def _renamed(value: Any, copied: Callable[[Any], Any]) -> Any:
    if type(value) is tuple:
        return tuple(_renamed(each, copied) for each in value)
    return copied(value)


def _has_tensors(items: Iterable[tuple[Any, Any]]) -> bool:
    return any(value is Mark.TENSOR for _, value in items)
