"""What a call means: what the called function will read, and what is to be called in its place.

A function of the user's is observed itself. One that is not looked into, in C or of a library's, is taken to read all
that its operands lead to, unless its meaning is known.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from fxlib.capture import source
from fxlib.capture.faults import fault
from fxlib.capture.intercept import suspended
from fxlib.capture.recording.arguments_asked import ArgumentsAsked
from fxlib.capture.recording.observations import CONTAINERS, Observations, is_torch
from fxlib.capture.recording.observers import (
    HEAP_TYPE,
    LRU_CACHE,
    ObservedFunctions,
    code_of,
    is_a,
    is_instrumented,
    is_observed,
)
from fxlib.capture.recording.record import STATELESS, VALUES, Record
from fxlib.runtime.guards.capture_facts import GRAD_MODE, Kind, attributes_of

_WRAPPERS: tuple[type, ...] = (
    type(object.__init__),
    type(str.join),
    type({}.__iter__),
    type(dict.__dict__["fromkeys"]),
)
_READS_NOTHING = frozenset(
    {isinstance, issubclass, id, callable, print, globals, locals, super, property, functools.partial, object}
    | {staticmethod, classmethod, functools.update_wrapper, functools.wraps}
)
"""Functions that look at no more than the class of what they are given."""
_BY_NAME = frozenset({getattr, hasattr, setattr, delattr})
_OF_TRACED = frozenset({type, hasattr, getattr, callable})
"""Functions that would answer otherwise of a stand-in than of what it stands for."""
_SHALLOW = frozenset(
    {len, iter, next, enumerate, zip, reversed, list, tuple, set, frozenset, dict, range, map, filter, any, all, bool}
)
"""Functions that look at what a container holds, and not at what that holds."""
_ITEM_METHODS = frozenset({"get", "__getitem__", "__contains__", "pop", "setdefault", "__setitem__", "__delitem__"})
_QUESTIONS = ("is_", "_is_", "get_", "_get_", "has_", "_has_", "are_", "device_count", "current_")
"""How functions of torch's begin that ask for a setting."""
_TRACING = frozenset({"is_compiling", "is_dynamo_compiling", "is_exporting", "is_fx_tracing", "is_fx_symbolic_tracing"})
"""Functions of torch's that say whether it makes a graph. A run says no."""
_OTHER_AT_EACH_RUN = frozenset(
    {"time", "os", "posix", "socket", "_socket", "secrets", "uuid", "datetime", "select", "io", "_io"}
    | {"subprocess", "tempfile", "signal", "multiprocessing", "queue", "_queue", "getpass"}
)
"""Modules of Python's whose functions answer by the world around."""
_CONSTANT_OS = frozenset({"fspath", "getenv", "fsencode", "fsdecode"})
_NO_CODE = compile("", "", "exec")


class Calls:
    """Makes facts of the calls that instrumented functions make."""

    def __init__(
        self,
        model: object,
        record: Record,
        functions: ObservedFunctions,
        arguments: ArgumentsAsked,
        observations: Observations,
    ) -> None:
        self.asked_grad_mode = False
        """Whether the forward behaves otherwise where no gradients are recorded."""
        self._model, self._record, self._functions, self._arguments = model, record, functions, arguments
        self._observations = observations

    def called(self, function: Any, *operands: Any) -> Any:
        """Return what is to be called: a function whose results are cached, without its cache."""
        kind = type(function)
        if issubclass(kind, VALUES):
            for each in operands:
                self._observations.deep(each)
            return function
        if kind is MethodType:
            inner = self.called(function.__func__, function.__self__, *operands)
            return function if inner is function.__func__ else MethodType(inner, function.__self__)
        if kind is LRU_CACHE:
            self._record.see(function)
            return self.called(function.__wrapped__, *operands)
        if kind is FunctionType:
            self._functions.discover_function(function)
            return function if is_instrumented(function.__code__) else self._leaf(function, operands)
        if operands and is_a(operands[0], Proxy) and _hashable(function) and function in _OF_TRACED:
            return self._arguments.of_traced(function, operands[0], operands[1:])
        if function is type and len(operands) == 1 and self._record.stand_ins is not None:
            return self._arguments.type_of_stand_in(operands[0])
        if is_a(function, type):
            self._functions.discover_class(function)
            self._constructed(function, operands)
            return function
        return self._called_in_c(function, operands)

    def _called_in_c(self, function: Any, operands: tuple[Any, ...]) -> Any:
        kind = type(function)
        if kind is BuiltinFunctionType:
            owner = function.__self__
            if owner is None or is_a(owner, (ModuleType, type)):
                return self._leaf(function, operands)
            self._method(owner, function.__name__, operands)
        elif kind in _WRAPPERS:
            bound = hasattr(function, "__self__")
            if bound or operands:
                owner, rest = (function.__self__, operands) if bound else (operands[0], operands[1:])
                self._method(owner, function.__name__, rest)
        elif kind is functools.partial:
            if self._record.knows(function):
                self._record.see(function)
            self.called(function.func, *function.args, *operands)
        else:
            self._functions.discover_class(kind)
            self._observations.special(kind)
            if is_a(function, nn.Module):
                if function is not self._model:
                    self._observations.on_class("forward", kind)
            elif not isinstance(kind.__call__, FunctionType):  # written in C, such as NumPy's functions
                self._object_in_c(function, operands)
        return function

    def _object_in_c(self, function: Any, operands: tuple[Any, ...]) -> None:
        """An object that is written in C is called."""
        if is_a(function, weakref.ref):
            self._record.see(function())
        for path in function.__reduce__()[1] if is_a(function, operator.attrgetter) else ():
            owner = operands[0]
            for name in path.split("."):
                self._observations.attribute(name, owner)
                owner = getattr(owner, name)
        for each in operands:
            self._observations.deep(each)

    def _constructed(self, kind: type, operands: tuple[Any, ...]) -> None:
        if kind in _READS_NOTHING or issubclass(kind, (Proxy, nn.Module)) or kind is type:
            return
        for each in operands:
            if kind in _SHALLOW or kind.__module__ == "itertools":
                self._contents_of_argument(each)
            elif not kind.__flags__ & HEAP_TYPE or not is_observed(code_of(kind.__init__)):
                self._observations.deep(each)
        if kind is torch.Generator:
            raise fault(
                "the forward makes a random generator, which a graph would not make anew at each run",
                hint="Make it before, and keep it as an attribute of the model.",
            )

    def _contents_of_argument(self, value: Any) -> None:
        if is_a(value, BuiltinFunctionType):
            self._observations.deep(value)
        elif is_a(value, (tuple, list)) and not self._record.knows(value):  # of a call with a star
            for each in value:
                self._observations.contents(each)
        else:
            self._observations.contents(value)

    def _method(self, owner: Any, name: str, operands: tuple[Any, ...]) -> None:
        """A method that is written in C."""
        if is_a(owner, VALUES):
            return
        if name in ("__getattribute__", "__getattr__") and operands and is_a(operands[0], str):
            self._observations.attribute(operands[0], owner)
            return
        if name in ("__setattr__", "__delattr__") and operands and is_a(operands[0], str):
            self._observations.stored(operands[0], owner)
            return
        if is_a(owner, dict) and name in _ITEM_METHODS and operands:
            self._observations.item_stored(owner, operands[0]) if self._record.knows(owner) else None
        elif self._record.knows(owner) and (fact := self._observations.contents(owner)) is not None:
            fact.where = fact.where or source.here()
        elif is_a(owner, torch.Generator) and name in ("manual_seed", "seed", "set_state"):
            raise fault(
                "the forward seeds a random generator, which a graph would not do at each run",
                hint="Seed it before the forward.",
            )
        for each in operands:
            self._observations.deep(each)

    def _leaf(self, function: Any, operands: tuple[Any, ...]) -> Any:
        """A function that is not looked into: torch's, Python's, or one in C."""
        module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
        if not _hashable(function) or (code_of(function) or _NO_CODE).co_filename.startswith(source.CAPTURE):
            return function  # the latter is intercepted
        if function in _BY_NAME:
            return self._by_name(function, operands)
        if is_torch(module):
            return self._torchs(function, name, operands)
        if module.partition(".")[0] in _OTHER_AT_EACH_RUN and name not in _CONSTANT_OS and "path" not in module:
            self._other_at_each_run(f"{module}.{name}")
        if function is vars and operands:
            self._record.see(attributes_of(operands[0])) if self._record.knows(operands[0]) else None
            self._observations.deep(attributes_of(operands[0]))
        for each in operands if function not in _READS_NOTHING else ():
            if function is len:
                self._observations.length(each)
            elif function in _SHALLOW:
                self._contents_of_argument(each)
            else:
                self._observations.deep(each)
        return function

    @staticmethod
    def _other_at_each_run(name: str) -> None:
        raise fault(
            f"the forward calls {name}, whose answer may be another at each run, and a graph keeps one",
            hint="Call it before the forward, or make what calls it a leaf with wrap=.",
        )

    def _by_name(self, function: Any, operands: tuple[Any, ...]) -> Any:
        owner, name, *_ = operands if len(operands) > 1 else (None, None)
        if is_a(name, str) and not is_a(owner, VALUES):
            self._observations.attribute(name, owner) if function in (getattr, hasattr) else self._observations.stored(
                name, owner
            )
        return function

    def _torchs(self, function: Any, name: str, operands: tuple[Any, ...]) -> Any:
        if name in GRAD_MODE:
            self.asked_grad_mode = True
        elif name in _TRACING:
            return lambda *_, **__: False
        elif name.startswith(_QUESTIONS) and all(type(each) in STATELESS for each in operands):
            with suspended(), contextlib.suppress(Exception):  # which the call itself will raise
                answer = function(*operands)
                if type(answer) in STATELESS:
                    self._record.fact(Kind.QUESTION, function, operands, answer)
        else:
            for each in operands:
                if is_a(each, (*CONTAINERS, tuple)):
                    self._observations.deep(each)
        return function


def _hashable(function: Any) -> bool:
    """Whether a function may be looked up: one of a kind that compares by identity."""
    return type(function) in (FunctionType, BuiltinFunctionType) or isinstance(function, type)
