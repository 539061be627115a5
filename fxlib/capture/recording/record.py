"""The record of one capture: the facts that were read, the objects that existed before it, and their restoration."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import Node, Proxy

from fxlib.capture import source
from fxlib.capture.recording.observers import ObservedFunctions, code_of, entries_of, functions_in, is_a
from fxlib.errors import CaptureError
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards.capture_facts import SCALARS, Fact, Kind, attributes_of, contents_of, is_array
from fxlib.runtime.guards.dict_entries import Mark
from fxlib.runtime.submodules import local_modules

STATELESS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice, CodeType, torch.dtype, torch.device}
    | {torch.Size, torch.layout, torch.memory_format}
)
LARGE = 20_000
"""Number of entries above which a container counts as large; comparing so many takes about a millisecond."""
VALUES = (Proxy, Node, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Classes of the values that a graph is made of; reading one is not a fact about Python's state."""
METHOD_WRAPPER: type = type(object().__str__)


class Tracer(Protocol):
    """The part that a record uses of the tracer that makes the graph; the tracer is built on this package."""

    tensor_attrs: Any
    """The path of each of the model's plain tensors that the graph reads."""

    def class_of_value(self, value: Proxy) -> type:
        """Return the class that a traced value surely has."""

    def forget(self) -> None:
        """Drop all references to the objects of one capture."""


class ExportedTensors(Protocol):
    """The part that a record uses of the object that answers for the tensors of an export."""

    def compared(self, one: Any, other: Any) -> None:
        """Refuse to compare two tensors by identity that may be one in a run."""

    def class_of(self, tensor: torch.Tensor) -> type:
        """Return the class that a tensor has in a run."""

    asked_classes: dict[tuple[str, tuple[tuple[str, Any], ...]], type]
    """The classes of the arguments, and of the parts of arguments, that were asked for their class."""

    def class_asked(self, tensor: torch.Tensor) -> None:
        """Note that an argument was asked for its class."""

    def asked_for_class(self, tensor: torch.Tensor) -> None:
        """Refuse to answer an attribute that tells the class."""

    def asked_for_id(self, tensor: torch.Tensor) -> None:
        """Refuse to give the id of a tensor that a run computes."""

    def argument(self, tensor: torch.Tensor) -> str:
        """Return the name of the argument that a tensor is, or "" if it is not an argument or only inside one."""

    def real(self, tensor: torch.Tensor, attribute: str) -> torch.Tensor | None:
        """Return the model's tensor that is asked for an attribute, or None; refuse if a run may answer differently."""


class Record:
    """The facts that one capture has read, and the objects that existed before it.

    Args:
        model: the model, or a function. Its own modules are watched by `state.unchanged`, too.
        functions: the observed functions, to which the functions and classes that are seen are added.
    """

    def __init__(self, model: object, functions: ObservedFunctions) -> None:
        self.tracer: Tracer | None = None
        """The tracer that makes the graph; None if an export does."""
        self.stand_ins: ExportedTensors | None = None
        """The object that answers for the tensors of an export."""
        self._functions = functions
        modules = modules_of(model) if isinstance(model, nn.Module) else []
        self.modules = {id(each): each for each in modules}
        self._state: dict[int, torch.Tensor] = {}
        self._tracked: dict[int, Any] = {}
        self._facts: dict[tuple[Kind, int, Any], Fact] = {}
        self._only: dict[int, torch.Tensor] = {}
        """Tensors that were asked for something that no other tensor in their place would answer equally, by id."""
        self.cached_calls: list[Callable[[], Any]] = []
        """The calls of functions that cache their results, in order; each of them finds its result in the cache."""
        self.sharing: list[tuple[torch.Tensor, str]] = []
        """Tensors that share the memory of Python objects, each with the statement that made it."""
        self.asked_classes = False
        """Whether the forward asked for the classes of parameters or buffers."""
        self._counted: set[int] = set()
        self.large: dict[int, str] = {}
        """Warnings about large containers that the forward has searched, by the containers' ids."""
        self.written: dict[tuple[int, str], str] = {}
        """The place where the forward first wrote to each attribute of a module, by the module's id and the name."""
        self.stuck: list[Fact] = []
        """The facts that the forward has changed, and that cannot be put back."""
        self._made: list[tuple[weakref.ref[Any], str]] = []
        self._alone = True
        """Whether this was the only thread when the forward began."""

    def begin(self) -> None:
        """Note which tensors stand for parameters and buffers now; under export, these are stand-ins.

        Objects that `gc.freeze` has set aside are made visible again, and stay so: the garbage collector does not tell
        what they refer to, and to freeze again what is there behind a capture would keep its garbage for good.
        """
        gc.unfreeze()
        tables = [table for each in self.modules.values() for table in (each._parameters, each._buffers)]
        self._state = {id(value): value for table in tables for value in table.values() if value is not None}
        self._alone = threading.active_count() == 1

    def fact(self, kind: Kind, owner: Any, key: Any, value: Any) -> Fact:
        """Note what was found in one place and return the fact; for a known place, return what was found first."""
        place = (kind, id(owner), tuple(map(id, key)) if kind is Kind.QUESTION else key)
        ours = is_ours(value)
        if ours and not _is_leaf(owner, value):  # it makes a call (`rpc_sync`), and operators look it up in each run
            return Fact(kind, owner, key, value)
        if (known := self._facts.get(place)) is None:
            self._tracked.setdefault(id(owner), owner)
            known = self._facts[place] = Fact(kind, owner, key, value)
            if not ours:
                self._see_contents(value)
        return known

    def known_fact(self, kind: Kind, owner: Any, key: Any) -> Fact | None:
        """Return the fact about a place, if there is one."""
        return self._facts.get((kind, id(owner), key))

    def _see_contents(self, value: Any) -> None:
        if type(value) in (tuple, frozenset):
            for each in value:
                self._see_contents(each)
        else:
            self.see(value)

    def see(self, value: Any) -> None:
        """Note a value that existed before the capture, so that what is read from it becomes a fact as well."""
        kind = type(value)
        if kind in STATELESS or kind is Mark or id(value) in self._tracked:
            return
        if issubclass(kind, VALUES):
            if issubclass(kind, torch.Tensor):
                self._tracked[id(value)] = value
            return
        self._tracked[id(value)] = value
        if issubclass(kind, (tuple, frozenset)):
            for each in value:
                self.see(each)
        if issubclass(kind, type):
            self._functions.discover_class(value)
        self._functions.note_cache(value)
        for function in functions_in(value):
            self._functions.discover_function(function)
        if kind is MethodType or kind is BuiltinFunctionType or kind is METHOD_WRAPPER:
            self.see(value.__self__)
        elif kind is functools.partial:
            for each in (value.func, *value.args, value.keywords):
                self.see(each)
        self._functions.discover_class(kind)

    def path_in_graph(self, tensor: torch.Tensor) -> str | None:
        """Return the path by which the graph reads one of the model's plain tensors in each run, or None."""
        return None if self.tracer is None else self.tracer.tensor_attrs.get(tensor)

    def knows(self, value: Any) -> bool:
        """Return whether a value existed before the capture."""
        return id(value) in self._tracked or id(value) in self.modules or is_a(value, (type, ModuleType))

    def known_ids(self) -> set[int]:
        """Return the ids of the objects that existed before the capture and were read."""
        return {*self._tracked, *self.modules}

    def or_mark(self, value: Any) -> Any:
        """Return a value, or the mark of tensors for a tensor that the graph reads in each run."""
        if not is_a(value, torch.Tensor):
            return value
        return Mark.TENSOR if id(value) in self._state or self.path_in_graph(value) is not None else value

    def count(self, container: Any) -> None:
        """Note that the length of a container was read."""
        if (Kind.CONTENTS, id(container), None) not in self._facts:
            self._facts[Kind.CONTENTS, id(container), None] = Fact(
                Kind.CONTENTS, container, None, contents_of(container)
            )
            self._counted.add(id(container))

    def look_into(self, container: Any, held: Any) -> Fact:
        """Note the contents of a container, and return the fact."""
        if id(container) in self._counted:
            self._counted.discard(id(container))
            del self._facts[Kind.CONTENTS, id(container), None]
        if not is_array(container) and len(held) > LARGE and id(container) not in self.large:
            self.large[id(container)] = (
                f"{source.here()}: the forward looks through a {type(container).__name__} of {len(held):,} entries, "
                "and each run compares them all, which takes milliseconds: keep them in a tuple or a tensor"
            )
        return self.fact(Kind.CONTENTS, container, None, held)

    def hold_to(self, table: dict[str, Any], name: str) -> None:
        """Note which tensor is in a table, since it must be the same one in each run."""
        self.fact(Kind.ITEM, table, name, table[name]).value = table[name]

    def value_asked(self, tensor: torch.Tensor) -> None:
        """Note that the elements of a tensor were read without a node of the graph."""
        if self.known_fact(Kind.VALUE, tensor, None) is None:
            self._only[id(tensor)] = tensor
            self.fact(Kind.VALUE, tensor, None, tensor.detach().clone())

    def class_asked(self, tensor: torch.Tensor) -> None:
        """Note that a tensor was asked for its class."""
        self.asked_classes = True
        if self.stand_ins is not None:
            self.stand_ins.class_asked(tensor)
        if id(tensor) not in self._state and (self.knows(tensor) or self.path_in_graph(tensor) is not None):
            self._only[id(tensor)] = tensor

    def method_of_tensors(self, *names: str) -> None:
        """Note the tensor methods that the exported forward uses; a graph has the operators behind them."""
        for name in names:
            self.fact(Kind.CLASS, torch.Tensor, name, torch.Tensor.__dict__.get(name, Mark.ABSENT))

    def history_asked(self, tensor: torch.Tensor, name: str) -> None:
        """Note an attribute of a tensor that tells its history."""
        self._only[id(tensor)] = tensor
        self.fact(Kind.GETTER, tensor, name, getattr(tensor, name))

    def attribute_asked(self, tensor: torch.Tensor, name: str) -> None:
        """Note that a tensor was asked for an attribute that its class lacks."""
        real = tensor if self.stand_ins is None else self.stand_ins.real(tensor, name)
        if real is not None and (real is not tensor or self.knows(tensor) or id(tensor) in self._state):
            self._only[id(real)] = real
            self.fact(Kind.ATTRIBUTE, real, name, attributes_of(real).get(name, Mark.ABSENT))

    def note_made(self, stand_in: Any, where: str) -> None:
        """Note a stand-in for a value and the statement that made it; nothing may keep it after the capture."""
        self._made.append((weakref.ref(stand_in), where))

    def refuse_leaks(self) -> None:
        """Check that no stand-in is left in the program, where the original forward would find it.

        Raises:
            CaptureError: an object still refers to a stand-in.
        """
        self._tracked.clear()
        self._state.clear()
        self._only.clear()
        self.sharing.clear()
        if self.tracer is not None:
            self.tracer.forget()
        self.tracer = self.stand_ins = None
        for generation in (1, 2):  # objects made meanwhile are young if nothing was collected
            if any(made() is not None for made, _ in self._made):
                gc.collect(generation)
        for made, where in self._made:
            stand_in = made()
            if stand_in is not None and (holders := _holders(stand_in)):
                what = str(stand_in) if isinstance(stand_in, Proxy) else "a tensor without values"
                raise CaptureError(
                    f"the forward leaves {what}, which stands for one of a step, in a {' or '.join(holders)} that "
                    "outlives it",
                    where=where,
                    hint="Keep it out of what lives longer than a step, or fill that before the capture.",
                )

    def facts(self) -> tuple[Fact, ...]:
        """Return all facts. Containers whose elements were only counted are watched for their length alone."""
        for fact in self._facts.values() if self._only else ():
            if fact.value is Mark.TENSOR and id(fact.now()) in self._only:
                fact.value = fact.now()
            elif fact.kind is Kind.CONTENTS and isinstance(fact.owner, dict):
                held = [self._only.get(id(fact.owner.get(key)), value) for key, value in fact.value]
                fact.value = tuple((key, each) for (key, _), each in zip(fact.value, held, strict=True))
        return tuple(
            Fact(Kind.LENGTH, each.owner, None, len(each.owner)) if self._is_counted(each) else each
            for each in self._facts.values()
        )

    def _is_counted(self, fact: Fact) -> bool:
        return fact.kind is Kind.CONTENTS and id(fact.owner) in self._counted

    def forget_changed(self) -> None:
        """Drop the facts that do not hold, except for those that the capture itself has changed."""
        for place, fact in list(self._facts.items()):
            if fact.kind not in (Kind.MEMO, Kind.CODE, Kind.QUESTION) and not is_ours(fact.value) and not fact.holds():
                del self._facts[place]
                if fact.kind is Kind.CONTENTS:
                    self._counted.discard(id(fact.owner))

    def restore(self) -> tuple[list[Fact], str]:
        """Put back what the forward has changed; return these facts, and in words what another thread has changed.

        The forward's own writes are known. Any other change may be another thread's, if there is one.
        """
        for cache, misses, entries in self._functions.caches.values():
            if cache.cache_info().misses != misses:
                _forget_results(cache, entries)
        changed: list[Fact] = []
        others: list[Fact] = []
        alone = self._alone and threading.active_count() == 1
        for place, fact in list(self._facts.items()):
            try:
                self._put_back(fact, changed, others, alone=alone)
            except Exception:  # noqa: BLE001 - whatever an object raises, the other facts are put back
                self.stuck.append(self._facts.pop(place))
        return changed, str(others[0]) if others else ""

    def _put_back(self, fact: Fact, changed: list[Fact], others: list[Fact], *, alone: bool) -> None:
        """Put back what was found, and add the fact to those that the forward, or another thread, has changed."""
        if fact.kind is Kind.MEMO:
            if (now := fact.now()) is not Mark.ABSENT:
                fact.value = now
            fact.restore()
            if not _is_constant(fact.value):  # a run that fills the cache keeps one value for all steps
                changed.append(fact)
            return
        if fact.kind is Kind.CONTENTS and isinstance(fact.owner, dict):
            fact.value = tuple((key, _unwrapped(each, dict.get(fact.owner, key))) for key, each in fact.value)
        if fact.kind is Kind.CODE or fact.holds():  # the code is put back later
            return
        if fact.kind is Kind.QUESTION or is_ours(fact.value):
            fact.value = fact.now()  # its value outside the trace
        elif not (alone or fact.where or _is_cache(fact)):
            others.append(fact)
        else:
            fact.restore()
            if not _is_cache(fact):
                changed.append(fact)

    def leave(self) -> Fact | None:
        """Set each fact to its present value, now that the capture's replacements are gone.

        Return a library's setting that differed during the capture, as the exporter changes some, or None if the
        forward has read no such setting.
        """
        other = None
        for fact in self._facts.values():
            if fact.kind is not Kind.MEMO and not fact.holds():
                if fact.kind is Kind.GETTER and isinstance(fact.owner, ModuleType) and type(fact.value) in STATELESS:
                    other = fact
                fact.value = fact.now()
        return other


def _forget_results(cache: Any, known: tuple[Any, ...]) -> None:
    """Remove from a cache what a capture has put there, because a function in C has called it."""
    if not known:
        cache.cache_clear()
        return
    entries = entries_of(cache)
    for key in [each for each in entries if each not in known]:
        del entries[key]


def _holders(value: object) -> list[str]:
    """Return the names of the classes of a value's referrers, except for frames and torch's own objects."""
    found = {type(each) for each in gc.get_referrers(value)}
    return sorted(each.__name__ for each in found - {FrameType} if not each.__module__.startswith("torch."))


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules whose forwards a capture goes through, including the original behind a captured module."""
    found = [each for _, each in local_modules(model)]
    for each in found.copy():
        if isinstance(each, CapturedModule) and isinstance(each._fxlib.original, nn.Module):
            found += modules_of(each._fxlib.original)
    return found


def is_ours(value: Any) -> bool:
    """Return whether a value is a temporary replacement that torch.fx or the capture has put in place of another."""
    code = code_of(value)
    return code is not None and code.co_filename.startswith((f"{source.TORCH}fx/", source.CAPTURE))


def _is_leaf(owner: Any, value: Any) -> bool:
    """Return whether a function that is ours now is one that the graph calls as it is, or replaces such a one.

    torch.fx replaces some functions in a scope by its own (`math.sqrt`, and those that `torch.fx.wrap` names), and
    `restore` takes the originals; the capture only gives functions other code.
    """
    if value.__code__.co_filename.startswith(f"{source.TORCH}fx/"):
        return is_a(owner, (dict, ModuleType))
    return str(value.__module__).partition(".")[0] not in ("torch", "fxlib")


def _unwrapped(value: Any, now: Any) -> Any:
    """Return the original that is in a scope again, if a value is torch.fx's replacement of it during the trace."""
    return now if is_ours(value) and value.__dict__.get("__wrapped__", value) is now else value


def _is_cache(fact: Fact) -> bool:
    """Return whether the change is that a cached property was computed for the first time."""
    return (
        fact.kind is Kind.ATTRIBUTE
        and fact.value is Mark.ABSENT
        and isinstance(getattr(type(fact.owner), str(fact.key), None), functools.cached_property)
    )


def _is_constant(value: Any) -> bool:
    """Return whether a value is the same whoever computes it and cannot be changed."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, (*SCALARS, type, FunctionType, ModuleType, torch.dtype, torch.device))
