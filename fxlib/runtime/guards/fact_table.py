"""All facts of one capture, laid out so that a few passes in C compare them."""

from __future__ import annotations

import copy
from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, call, eq, is_, is_not
from types import FunctionType
from typing import Any

from torch import nn
from torch.fx import Graph, Node
from torch.jit import is_tracing

from fxlib.runtime.guards.capture_facts import (
    GRAD_MODE,
    IDENTICAL_IF_EQUAL,
    REBOUND,
    SCALARS,
    ArgumentFact,
    Change,
    Fact,
    Kind,
    attributes_of,
    change_of,
    same,
)
from fxlib.runtime.guards.dict_entries import DictEntries, Mark, table_of_class
from fxlib.runtime.guards.export_guards import GuardedCodeGen

_KINDS = frozenset({type, ABCMeta})
"""The classes of most classes. Both compute names of a class themselves; `ABCMeta` asks a class's own hook, if any."""
_NAMES = frozenset({"__name__", "__qualname__"})


@dataclass(slots=True)
class _Column:
    """The facts of one kind: `read`, in one pass in C, has to find for each owner the value beside it."""

    read: Callable[..., Any]
    matches: Callable[[Any, Any], Any] = is_
    is_flat: bool = False
    """Whether `read` finds several values for each owner, which stand one after another in `values`."""
    owners: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def holds(self) -> bool:
        """Return whether each owner's value is exactly as it was."""
        found = map(self.read, self.owners)
        return all(map(self.matches, chain.from_iterable(found) if self.is_flat else found, self.values))


class _Answers:
    """The answers of functions without effects, each of them one object that every call returns."""

    def __init__(self) -> None:
        self._questions: dict[int, list[list[Any]]] = {}
        """By the number of arguments: the answers, the functions, their first arguments, and so on."""

    def add(self, answer: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Hold a function to its answer."""
        question = (answer, function, *arguments)
        columns = self._questions.setdefault(len(arguments), [[] for _ in question])
        for column, each in zip(columns, question, strict=True):
            column.append(each)

    def hold(self) -> bool:
        """Return whether each function still gives that answer."""
        for answers, *asked in self._questions.values():
            try:
                found = list(map(call, *asked))
            except Exception:  # noqa: BLE001 - a class's own hook may raise anything: each fact is asked in its turn
                return False
            # A StopIteration of such a hook ends the list.
            if len(found) < len(answers) or not all(map(is_, found, answers)):
                return False
        return True


class _Sets:
    """Sets of names and classes, of which those that are equal are the same."""

    def __init__(self) -> None:
        self._owners: list[set[Any]] = []
        self._values: list[frozenset[Any]] = []

    def add(self, owner: set[Any], value: frozenset[Any]) -> None:
        """Hold a set to its elements."""
        self._owners.append(owner)
        self._values.append(value)

    def hold(self) -> bool:
        """Return whether each set has just these elements."""
        kinds = map(type, chain.from_iterable(self._owners))
        return all(map(eq, self._owners, self._values)) and IDENTICAL_IF_EQUAL.issuperset(kinds)


class _Columns:
    """The facts of the most frequent kinds, laid out so that a few passes in C compare them all."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self._entries = DictEntries()
        self._types = _Column(type)
        self._bases = _Column(attrgetter("__mro__"))
        self._codes = _Column(attrgetter("__code__"))
        self._lengths = _Column(len, matches=eq)
        self._elements = _Column(iter, is_flat=True)
        self._defaults = _Column(attrgetter("__defaults__"))
        self._keyword_defaults = _Column(attrgetter("__kwdefaults__"))
        self._cells = _Column(attrgetter("cell_contents"))
        self._answers, self._sets = _Answers(), _Sets()
        self._others: list[Fact] = []
        for fact in facts:
            self._register(fact)
        columns = (self._types, self._bases, self._codes, self._defaults, self._keyword_defaults, self._cells)
        used = [each for each in columns if each.owners]
        # This joins their passes: a step that waits for servers finds little of the code in the processor's caches.
        self._reads, self._owners = [each.read for each in used], [each.owners for each in used]
        self._values = [value for each in used for value in each.values]
        self._contents = [each for each in (self._lengths, self._elements) if each.owners]  # lengths come first

    def hold(self) -> bool:
        """Return whether all facts hold exactly, with the same objects."""
        if not self._entries.holds():
            return False
        try:
            if not all(map(is_, chain.from_iterable(map(map, self._reads, self._owners)), self._values)):
                return False
        except ValueError:  # a closure's cell is empty
            return False
        for each in self._contents:
            if not each.holds():
                return False
        if not (self._answers.hold() and self._sets.hold()):
            return False
        return not self._others or all(each.holds() for each in self._others)

    def _register(self, fact: Fact) -> None:
        """Add a fact to the columns in which it is compared fastest."""
        kind, owner, value = fact.kind, fact.owner, fact.value
        if kind in (Kind.ATTRIBUTE, Kind.ITEM, Kind.CLASS):
            self._register_entry(fact)
        elif kind in (Kind.TYPE, Kind.BASES, Kind.CODE, Kind.LENGTH):
            columns = {
                Kind.TYPE: self._types,
                Kind.BASES: self._bases,
                Kind.CODE: self._codes,
                Kind.LENGTH: self._lengths,
            }
            _add(columns[kind], owner, value)
        elif kind is Kind.CONTENTS and isinstance(owner, dict):
            self._register_dict(owner, value)
        elif kind is Kind.CONTENTS and isinstance(owner, (list, deque)):
            _add(self._lengths, owner, len(value))
            if value:  # the length of an empty one says everything
                _add(self._elements, owner, *value)
        elif kind is Kind.DEFAULTS:
            _add(self._defaults, owner, value[0])
            _add(self._keyword_defaults, owner, value[1])
        elif kind is Kind.CELL and value is not Mark.ABSENT:
            _add(self._cells, owner, value)
        elif kind is Kind.GETTER and _is_own(owner, fact.key) and fact.now() is value:
            self._answers.add(value, getattr, owner, fact.key)
        elif kind is Kind.QUESTION and _is_plain_question(owner, fact.key):
            self._answers.add(value, owner, *fact.key)
        elif kind is Kind.CONTENTS and type(owner) is set and IDENTICAL_IF_EQUAL.issuperset(map(type, value)):
            self._sets.add(owner, value)
        else:
            self._others.append(fact)

    def _register_dict(self, owner: dict[Any, Any], items: Sequence[tuple[Any, Any]]) -> None:
        keys = [key for key, _ in items]
        if type(owner) is dict:
            self._entries.add_order(owner, keys)
        else:  # an order of its own may change without a write
            _add(self._lengths, owner, len(items))
            _add(self._elements, owner, *keys)
        for key, held in items:
            self._entries.add(owner, key, held)

    def _register_entry(self, fact: Fact) -> None:
        if fact.kind is Kind.ITEM:
            table = fact.owner
        elif fact.kind is Kind.CLASS:
            table = table_of_class(fact.owner)
        else:
            table = attributes_of(fact.owner)
        self._entries.add(table, fact.key, fact.value)
        if fact.varies:
            self._entries.let_vary(len(self._entries) - 1, same)


def _is_own(owner: Any, name: Any) -> bool:
    """Return whether Python itself computes an attribute of a function or a class."""
    return name in _NAMES and (type(owner) is FunctionType or type(owner) in _KINDS)


def _is_plain_question(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether a question is about tracing, or about a class that does not answer by a class of its own."""
    if function is isinstance or function is issubclass:
        return type(arguments[1]) in _KINDS
    return function is is_tracing


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
        """Watch these facts, all of which hold now.

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
        """Return the facts for a forward whose reads are unknown: numbers, flags and texts of modules.

        No argument of the graph may be None, True or False, except for those that the graph itself checks.
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
        """Return the facts of both sets."""
        arguments = (*self.arguments, *self._state)
        cached_calls = (*self._cached_calls, *other._cached_calls)
        return Facts((*self._facts, *other._facts), arguments, cached_calls=cached_calls)

    def ask_caches(self) -> None:
        """Ask caches as the forward does: they count this, and first forget what was unused for the longest time."""
        for ask in self._cached_calls:
            ask()

    def __len__(self) -> int:
        return len(self._facts)

    @property
    def asks_arguments(self) -> bool:
        """Whether the forward has asked about arguments or its model's tensors, or has asked caches."""
        return bool(self.arguments or self._state or self._cached_calls)

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
            if is_full or (fact.kind in REBOUND and fact.value is not Mark.TENSOR):
                now = fact.now()
                is_entry = fact.kind in (Kind.ATTRIBUTE, Kind.ITEM)
                fact.varies = fact.varies or (is_entry and now is not fact.value)
                fact.value = now
        self._columns = None
        return ""

    def changes(self) -> list[Change]:
        """Return the differences from the capture, except for code, which a capture replaces while it runs."""
        kept = (Kind.MEMO, Kind.CODE)
        return [change_of(fact) for fact in self._facts if fact.kind not in kept and not fact.holds()]

    def misfit(self, arguments: Mapping[str, Any]) -> str:
        """Return in words which argument is not as the graph expects; empty if all are."""
        return next(filter(None, (each.broken(arguments) for each in self.arguments)), "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Facts:
        """Return the same facts about the copies of objects that were copied already, and about the other objects."""

        def copied(value: Any) -> Any:
            return memo.get(id(value), value)

        facts = [copy.copy(each) for each in self._facts]
        for each in facts:
            each.owner = copied(each.owner)
            each.value = _renamed(each.value, copied)
        return Facts(facts, (*self.arguments, *self._state), cached_calls=self._cached_calls)


def names_grad_mode(modules: Iterable[nn.Module]) -> bool:
    """Return whether code of the modules' classes names a function that reads or sets the grad mode."""
    kinds = {base for each in modules for base in type(each).__mro__ if not base.__module__.startswith("torch.")}
    functions = [value for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)]
    return any(not GRAD_MODE.isdisjoint(each.__code__.co_names) for each in functions)


def _is_machinery(module: str) -> bool:
    """Return whether attributes of modules whose class is defined there have nothing to do with their results."""
    return module.startswith("torch.") and not module.startswith("torch.nn.modules.")


def _asserts(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")


def _renamed(value: Any, copied: Callable[[Any], Any]) -> Any:
    """Return a value with the copies of what it holds; a tuple of which nothing was copied is the same tuple."""
    if type(value) is tuple:
        renamed = tuple(_renamed(each, copied) for each in value)
        return renamed if any(map(is_not, renamed, value)) else value
    return copied(value)


def _has_tensors(items: Iterable[tuple[Any, Any]]) -> bool:
    return any(value is Mark.TENSOR for _, value in items)
