"""Decide for each call what the called function will read, and which function to call in its place.

The user's own functions are observed themselves. A function that is not looked into, because it is written in C or
belongs to a library, is assumed to read everything that its operands lead to, unless its meaning is known.

If a function caches its results (`functools.lru_cache`), a run would get the cache's answer. If the cache has an answer
already, that is used, and the entry is a fact. If it has none, the function's computation is traced, and nothing of it
is left in the cache; the first run is then the original's, which fills the cache. From then on, the graph runs if the
cache was filled with what the capture computed. A result that a run would keep, and that others could change or draw
anew (a tensor, a list, an object), is refused.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import io
import logging
import operator
import pathlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from fxlib.capture import source
from fxlib.capture.handled_errors import capture_error
from fxlib.capture.intercept import suspended
from fxlib.capture.recording.argument_assumptions import ArgumentAssumptions
from fxlib.capture.recording.context_managers import decorates_with
from fxlib.capture.recording.observations import Observations
from fxlib.capture.recording.observers import (
    HEAP_TYPE,
    LRU_CACHE,
    ObservedFunctions,
    code_of,
    entries_of,
    is_a,
    is_instrumented,
    is_observed,
)
from fxlib.capture.recording.parts import is_torch
from fxlib.capture.recording.record import STATELESS, VALUES, Record
from fxlib.capture.recording.sent_objects import SentObjects
from fxlib.runtime.guards.capture_facts import GRAD_MODE, Kind, attributes_of, class_items, context_items, is_memory
from fxlib.runtime.guards.dict_entries import Mark

_WRAPPERS: tuple[type, ...] = (
    type(object.__init__),
    type(str.join),
    type({}.__iter__),
    type(dict.__dict__["fromkeys"]),
)
_READS_NOTHING = frozenset(
    {id, globals, locals, super, property, functools.partial, object}
    | {staticmethod, classmethod, functools.update_wrapper, functools.wraps}
)
"""Functions that read nothing from their arguments."""
_MAKES_TEXT = frozenset({repr, ascii, format})
_ATTRIBUTE_METHODS = frozenset({"__getattribute__", "__getattr__", "__setattr__", "__delattr__"})
_TEXT_METHODS = frozenset({"__repr__", "__str__", "__format__"})
_WRITES_OUT = frozenset({print})
_BY_IDENTITY = frozenset({weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet})
_OF_CLASSES = frozenset({isinstance, issubclass, callable})
_RUNS_TEXT = frozenset({eval, exec, compile})
_BY_NAME = frozenset({getattr, hasattr, setattr, delattr})
_OF_TRACED = frozenset({type, hasattr, getattr, callable, isinstance})
"""Functions whose answers about a stand-in differ from those about the real value."""
_SHALLOW = frozenset({len, iter, next, enumerate, zip, reversed, list, tuple, set, frozenset, range, bool})
"""Functions that read the elements of a container, but nothing inside them."""
_MODULES_THAT_ANSWER = frozenset(
    {"sys", "decimal", "_decimal", "locale", "_locale", "gc", "platform", "threading", "_thread", "_contextvars"}
)
"""Standard modules with functions that return a setting, which each run reads again."""
_ANSWERS = ("get", "is", "current", "locked")
_LOGGERS_ANSWER = frozenset({"isEnabledFor", "getEffectiveLevel", "hasHandlers"})
_WRITES_NOTHING = frozenset({"builtins", "math", "cmath", "_operator", "itertools"})
_ITEM_METHODS = frozenset({"get", "__getitem__", "__contains__", "pop", "setdefault", "__setitem__", "__delitem__"})
_SHALLOW_METHODS = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "clear", "copy", "reverse"}
    | {"keys", "values", "items", "update", "add", "discard", "rotate", "__len__", "__iter__", "__getitem__", "__or__"}
)
"""Methods of containers that neither compare the elements nor read anything inside them."""
_QUESTIONS = ("is_", "_is_", "get_", "_get_", "has_", "_has_", "are_", "device_count", "current_", "initial_seed")
"""Prefixes of the names of torch functions that return a setting."""
_TRACING = frozenset({"is_compiling", "is_dynamo_compiling", "is_exporting", "is_fx_tracing", "is_fx_symbolic_tracing"})
"""Torch functions that tell whether a graph is being made; in a run, they return False."""
_MAKES_TENSORS = frozenset(
    {torch.arange, torch.as_tensor, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace}
    | {torch.logspace, torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm, torch.scalar_tensor}
    | {torch.tensor, torch.tril_indices, torch.triu_indices, torch.zeros}
)
"""Functions in C that take sizes and numbers; unlike those that take tensors, they do not dispatch to a stand-in."""
_OTHER_AT_EACH_RUN = frozenset(
    {"time", "os", "posix", "posixpath", "genericpath", "pathlib", "glob", "shutil", "socket", "_socket", "secrets"}
    | {"uuid", "datetime", "select", "io", "_io", "urllib", "http", "sqlite3", "shelve", "dbm", "linecache"}
    | {"zipfile", "tarfile", "gzip", "bz2", "lzma", "configparser", "fileinput", "mmap", "importlib"}
    | {"subprocess", "tempfile", "signal", "multiprocessing", "queue", "_queue", "getpass"}
)
"""Standard modules whose functions depend on the world outside the program."""
_LEVELS: Mapping[str, int] = {
    **{name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")},
    "exception": logging.ERROR,
    "warn": logging.WARNING,
}
"""The level at which each method of a logger writes."""
_CONSTANT_OS = frozenset(
    {"fspath", "fsencode", "fsdecode", "join", "split", "splitext", "splitdrive", "basename", "dirname", "normpath"}
    | {"normcase", "isabs", "commonprefix", "commonpath", "_get_sep", *vars(pathlib.PurePath)}
    | {"import_module", "quote", "unquote", "urlparse", "urlencode", "urlsplit"}
)
"""Functions of those modules whose results depend on their arguments alone."""
_IMPORTS = frozenset({__import__, importlib.import_module})
_SHARES_MEMORY = frozenset({torch.from_numpy, torch.frombuffer, torch.as_tensor, torch.asarray, torch.tensor})
"""Torch functions whose tensors share the memory of their arguments; the last one does so only under export."""
_WEAK = frozenset({"weakref", "_weakrefset"})
CONTAINERS = (list, dict, set, deque, bytearray)
_NO_CODE = compile("", "", "exec")


class Calls:
    """Derives facts from the calls that instrumented functions make."""

    def __init__(
        self,
        model: object,
        record: Record,
        functions: ObservedFunctions,
        arguments: ArgumentAssumptions,
        observations: Observations,
        *,
        sent: SentObjects,
    ) -> None:
        self._sent = sent
        self.asked_grad_mode = False
        """Whether the forward may behave differently when no gradients are recorded."""
        self._model, self._record, self._functions, self._arguments = model, record, functions, arguments
        self._observations = observations
        self._cached_results = CachedResults(record)
        self.writes_out = ""
        """The file:line of the first statement that prints or logs; empty if none does."""

    def forget(self) -> None:
        """Drop the results that were computed for caches."""
        self._cached_results.forget()

    def called(self, function: Any, *operands: Any) -> Any:
        """Return the function to call: in place of one whose results are cached, one that asks the cache."""
        kind = type(function)
        if issubclass(kind, VALUES):
            for each in operands:
                self._observations.deep(each)
            return function
        if kind is MethodType:
            self._context_manager(function, operands)
            inner = self.called(function.__func__, function.__self__, *operands)
            return function if inner is function.__func__ else MethodType(inner, function.__self__)
        if kind is LRU_CACHE:
            self._record.see(function)
            return self._cached_results.through(function, self.called(function.__wrapped__, *operands))
        if kind is FunctionType:
            self._functions.discover_function(function)
            instrumented = function if is_instrumented(function.__code__) else None
            return instrumented or self._dispatched(function, operands) or self._leaf(function, operands)
        if operands and is_a(operands[0], Proxy) and _hashable(function) and function in _OF_TRACED:
            return self._arguments.of_traced(function, operands[0], operands[1:])
        if function is type and len(operands) == 1 and self._record.stand_ins is not None:
            return self._arguments.type_of_stand_in(operands[0])
        if is_a(function, type):
            self._functions.discover_class(function)
            self._constructed(function, operands)
            return function
        return self._called_in_c(function, operands)

    def _context_manager(self, method: MethodType, operands: tuple[Any, ...]) -> None:
        """Handle the call of a method that enters a context manager by hand, or by an `ExitStack`."""
        if method.__func__.__name__ == "__enter__":
            self._observations.entered(method.__self__)
        elif method.__func__ in (contextlib.ExitStack.enter_context, contextlib.ExitStack.push) and operands:
            self._observations.entered(operands[0])

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
                for name in ("func", "args", "keywords"):  # `__setstate__` replaces these
                    self._record.fact(Kind.GETTER, function, name, getattr(function, name))
                self._observations.contents(function.keywords)
            inner = self.called(function.func, *function.args, *function.keywords.values(), *operands)
            if inner is not function.func:
                return functools.partial(inner, *function.args, **function.keywords)
        else:
            self._functions.discover_class(kind)
            self._observations.special(kind)
            self._observations.class_of(function)
            if is_a(function, nn.Module):
                if function is not self._model:
                    self._observations.on_class("forward", kind)
            elif not is_a(kind.__call__, FunctionType) or is_a(function, weakref.ref):  # for example NumPy's functions
                self._object_in_c(function, operands)
        return function

    def _object_in_c(self, function: Any, operands: tuple[Any, ...]) -> None:
        """Handle the call of an object whose class is written in C."""
        if is_a(function, weakref.ref):
            self._observations.weak(function)
        for path in function.__reduce__()[1] if is_a(function, operator.attrgetter) else ():
            owner = operands[0]
            for name in path.split("."):
                self._observations.attribute(name, owner)
                owner = getattr(owner, name)
        self._observations.deep(function)
        for each in operands:
            self._observations.deep(each)

    def _constructed(self, kind: type, operands: tuple[Any, ...]) -> None:
        if kind is type and len(operands) == 1:
            self._observations.class_of(operands[0])
        if kind in _READS_NOTHING or issubclass(kind, (Proxy, nn.Module)) or kind is type:
            return
        shallow = kind in _SHALLOW or kind.__module__ == "itertools"
        shallow |= kind in (map, filter) and is_a(operands[0], (FunctionType, MethodType))
        if kind is str and operands:
            self._observations.formatted(operands[0])
        self._made_by_class(kind)
        for each in operands:
            self._refuse_unseen(each, operands)
            if shallow or (kind is dict and is_a(each, dict)):
                self._contents_of_argument(each)
            elif not kind.__flags__ & HEAP_TYPE or not is_observed(code_of(kind.__init__)):
                self._observations.deep(each)
        if kind in _BY_IDENTITY:
            raise capture_error(
                f"the forward makes a {kind.__name__}, which tells by identity what it holds",
                hint="Make it before, or use a list.",
            )
        if kind is torch.Generator:
            raise capture_error(
                "the forward makes a random generator, which a graph would not make anew at each run",
                hint="Make it before, and keep it as an attribute of the model.",
            )

    def _made_by_class(self, kind: type) -> None:
        """Handle what making an instance reads of a class: a generated `__new__`, or the class of an enum's members."""
        if is_a(kind.__new__, FunctionType) and not is_instrumented(kind.__new__.__code__):
            self._observations.signature(kind.__new__)
        if self._observations.on_class("__call__", type(kind)) is not type.__call__ and type(kind) is not type:
            self._observations.class_contents(kind)
        if is_torch(kind.__module__) and (issubclass(kind, torch.Tensor) or not kind.__flags__ & HEAP_TYPE):
            self._observations.asked(torch.get_default_dtype, ())

    def _contents_of_argument(self, value: Any) -> None:
        if is_a(value, BuiltinFunctionType):
            self._observations.deep(value)
        else:
            self._observations.contents(value)

    def _method(self, owner: Any, name: str, operands: tuple[Any, ...]) -> None:
        """Handle the call of a method that is written in C."""
        if is_a(owner, VALUES):
            return
        if name in _ATTRIBUTE_METHODS and operands and is_a(operands[0], str):
            self._by_method(owner, name, operands[0])
            return
        if name in _TEXT_METHODS:
            self._observations.formatted(owner)
        if is_a(owner, dict) and name in _ITEM_METHODS and operands:
            self._arguments.looked_up(operands[0], owner)
            self._observations.item_stored(owner, operands[0]) if self._record.knows(owner) else None
        elif type(owner).__module__ in _MODULES_THAT_ANSWER and name.startswith(_ANSWERS):
            self._observations.asked(getattr(owner, name), operands)
        elif is_a(owner, io.IOBase):
            self._note_output()
        elif type(owner) not in STATELESS and not is_a(owner, ModuleType):
            if (fact := self._observations.contents(owner)) is not None:
                fact.where = fact.where or source.here()
            if not is_a(owner, CONTAINERS) or name not in _SHALLOW_METHODS:
                self._observations.deep(owner)
        if is_a(owner, torch.Generator) and name in ("manual_seed", "seed", "set_state"):
            raise capture_error(
                "the forward seeds a random generator, which a graph would not do at each run",
                hint="Seed it before the forward.",
            )
        for each in operands:
            self._observations.deep(each)

    def _by_method(self, owner: Any, method: str, name: str) -> None:
        if method in ("__getattribute__", "__getattr__"):
            self._observations.attribute(name, owner)
        else:
            self._observations.stored(name, owner)

    def _leaf(self, function: Any, operands: tuple[Any, ...]) -> Any:
        """Handle the call of a function that is not observed: torch's, Python's, or one in C."""
        module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
        if not _hashable(function) or (code_of(function) or _NO_CODE).co_filename.startswith(source.CAPTURE):
            return function  # calls of the latter are intercepted
        if function in _BY_NAME:
            return self._by_name(function, operands)
        self._identity_or_block(function, operands)
        self._librarys(function, module, operands)
        if is_torch(module):
            return self._torchs(function, name, operands)
        if name == "getenv" or (module in _MODULES_THAT_ANSWER and name.startswith(_ANSWERS)):
            self._observations.asked(function, operands)
            return function
        self._refuse_unknown(function, module, name)
        if module.partition(".")[0] == "logging" or function in _WRITES_OUT:
            return self._wrote_out(function, name, operands)
        if function in _OF_CLASSES:
            self._class_asked(function, *operands)
            return function
        self._observations.writer = "" if module in _WRITES_NOTHING else source.here()
        for each in operands if function not in _READS_NOTHING else ():
            self._refuse_unseen(each, operands)
            self._given(function, each)
        self._observations.writer = ""
        return function

    def _refuse_unknown(self, function: Any, module: str, name: str) -> None:
        """Refuse functions whose results depend on what is not observed here."""
        if module.partition(".")[0] in _OTHER_AT_EACH_RUN and name not in _CONSTANT_OS:
            self._other_at_each_run(f"{module}.{name}")
        if name == "__subclasses__" or (module.partition(".")[0] == "numpy" and name.startswith("get")):  # settings
            self._other_at_each_run(f"{module}.{name}".lstrip("."))
        if function in _RUNS_TEXT:
            raise capture_error(
                f"the forward calls {name}(), and what the text reads is not seen",
                hint="Write it as a function, or make what calls it a leaf with wrap=.",
            )

    def _librarys(self, function: Any, module: str, operands: tuple[Any, ...]) -> None:
        """Handle functions of Python's library that read more than their arguments lead to."""
        if function in _IMPORTS and operands and is_a(operands[0], str):
            self._observations.imported_by_name(*operands)
        if module in _WEAK and operands and type(operands[0]).__module__ in _WEAK:
            self._observations.weak(operands[0])
        if module == "inspect":
            self._inspected(operands)
        if function is contextvars.copy_context:
            self._observations.asked(context_items, ())
        if function in _MAKES_TEXT and operands:
            self._observations.formatted(operands[0])
        if function is vars and operands and is_a(operands[0], type):
            self._observations.asked(class_items, operands)
        elif function is dir and operands:
            self._observations.class_contents(operands[0] if is_a(operands[0], type) else type(operands[0]), names=True)
        elif is_a(function, FunctionType) and module.partition(".")[0] in sys.stdlib_module_names:
            for each in operands:
                self._observations.class_contents(each, names=True) if is_a(each, type) else None
        elif function is vars and operands:
            self._record.see(attributes_of(operands[0])) if self._record.knows(operands[0]) else None
            self._observations.deep(attributes_of(operands[0]))

    def _inspected(self, operands: tuple[Any, ...]) -> None:
        """Handle functions that tell how functions and classes are called."""
        for each in operands:
            made = (each.__init__, each.__new__) if is_a(each, type) else (each,)
            for function in map(inspect.unwrap, made) if is_a(each, (type, FunctionType, MethodType)) else ():
                self._observations.signature(function.__func__ if is_a(function, MethodType) else function)

    def _identity_or_block(self, function: Any, operands: tuple[Any, ...]) -> None:
        """Handle a function that tells which objects are identical, or that runs in a context manager's block."""
        if function in (operator.is_, operator.is_not) and len(operands) == 2:
            self._arguments.identity(*operands)
        elif function is id and operands:
            self._arguments.asked_for_id(operands[0])
        elif (manager := decorates_with(function)) is not None:
            self._observations.entered(manager)

    def _dispatched(self, function: FunctionType, operands: tuple[Any, ...]) -> Any:
        """Return the target of a call of a `functools.singledispatch` function, or None for any other function."""
        if function.__code__.co_filename != functools.__file__ or function.__code__.co_name != "wrapper":
            return None
        held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if not operands or "dispatch" not in held:
            return None
        registry = held["dispatch"].cell_contents.__closure__
        for cell in registry or ():
            if is_a(cell.cell_contents, dict):
                self._record.see(cell.cell_contents)
                self._observations.contents(cell.cell_contents)
        self._observations.class_of(operands[0])
        chosen = held["dispatch"].cell_contents(self._arguments.dispatched(operands[0]))
        return self.called(chosen, *operands)

    def _given(self, function: Any, value: Any) -> None:
        if function is len:
            self._observations.length(value)
        elif function in _SHALLOW:
            self._contents_of_argument(value)
        else:
            self._observations.deep(value)

    def _wrote_out(self, function: Any, name: str, operands: tuple[Any, ...]) -> Any:
        logger = operands[0] if operands and is_a(operands[0], logging.Logger) else None
        if name in _LOGGERS_ANSWER:
            self._observations.asked(function, operands)
        elif logger is not None and name in _LEVELS and not logger.isEnabledFor(_LEVELS[name]):
            pass  # nothing is written
        elif not name.startswith("get"):
            return self._unseen(function)
        return function

    def _unseen(self, function: Any) -> Any:
        """Return a function that prints or logs unobserved, so that handlers are not taken for the forward's code."""
        self._note_output()

        def call(*args: Any, **kwargs: Any) -> Any:
            with suspended():
                return function(*args, **kwargs)

        return call

    def _refuse_unseen(self, value: Any, operands: tuple[Any, ...]) -> None:
        self._arguments.handed_on(value, [each for each in operands if each is not value])
        if type(value) is LRU_CACHE:
            raise capture_error(
                "the forward hands a function that caches its results to one that is written in C, and what the cache "
                "answers is not seen",
                hint="Call it in the forward, as in [cached(each) for each in values].",
            )

    def _note_output(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != logging.__file__:
            frame = frame.f_back
        if frame is None:  # otherwise, it is torch's own log of a trace
            self.writes_out = self.writes_out or source.here()

    def _class_asked(self, function: Any, value: Any = None, kinds: Any = ()) -> None:
        if function is isinstance:
            self._observations.instance_of(value, kinds)
        elif function is callable:
            self._observations.class_of(value)
            self._observations.on_class("__call__", type(value))
        else:
            if is_a(value, type):
                self._observations.bases(value)
            for each in kinds if is_a(kinds, tuple) else (kinds,):
                if type(each) is not type:
                    self._observations.asked(issubclass, (value, each))

    @staticmethod
    def _other_at_each_run(name: str) -> None:
        raise capture_error(
            f"the forward calls {name}, whose answer may be another at each run, and a graph keeps one",
            hint="Call it before the forward, or make what calls it a leaf with wrap=.",
        )

    def _by_name(self, function: Any, operands: tuple[Any, ...]) -> Any:
        owner, name, *_ = operands if len(operands) > 1 else (None, None)
        if is_a(name, str):
            self._observations.attribute(name, owner) if function in (getattr, hasattr) else self._observations.stored(
                name, owner
            )
        return function

    def _shared(self, function: Any) -> Any:
        """Return a wrapper of a function whose result shares memory with its arguments; the wrapper records these."""

        def share(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            self._record.sharing.append((made, source.here()))
            for each in (*args, *kwargs.values()):
                if is_memory(each) and not self._record.knows(each):
                    self._sent.note(each, by_client=False)
            return made

        return share

    def _torchs(self, function: Any, name: str, operands: tuple[Any, ...]) -> Any:
        if function in _SHARES_MEMORY and any(map(is_memory, operands)):
            return self._shared(function)
        if function in _MAKES_TENSORS and (number := _traced_among(operands)) is not None:
            return lambda *args, **kwargs: number.tracer.create_proxy("call_function", function, args, kwargs)
        if name in GRAD_MODE:
            self.asked_grad_mode = True
        elif name in _TRACING:
            return lambda *_, **__: False
        elif name.startswith(_QUESTIONS) and all(type(each) in STATELESS for each in operands):
            with suspended(), contextlib.suppress(Exception):  # the call itself will raise it
                answer = function(*operands)
                if all(type(each) in STATELESS for each in (answer if type(answer) is tuple else (answer,))):
                    self._record.fact(Kind.QUESTION, function, operands, answer)
        else:
            for each in operands:
                if is_a(each, (*CONTAINERS, tuple)):
                    self._observations.deep(each)
        return function


def _traced_among(operands: tuple[Any, ...]) -> Proxy | None:
    """Return a traced value among a call's operands, on its own or in a sequence of sizes, or None."""
    flat = (each for one in operands for each in (one if type(one) in (list, tuple) else (one,)))
    return next((each for each in flat if is_a(each, Proxy)), None)


def _hashable(function: Any) -> bool:
    """Return whether a function can be looked up in a set, because its class compares by identity."""
    return type(function) in (FunctionType, BuiltinFunctionType) or is_a(function, type)


class CachedResults:
    """The cached results that one capture has requested."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._computed: dict[tuple[int, Any], Any] = {}
        self._computing = 0

    def through(self, cache: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in place of `cache`; `compute` traces a result."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            if _has_values((*args, *kwargs.values())):
                raise capture_error(
                    f"the forward calls {getattr(cache, '__qualname__', 'a function')}, which caches its results, with "
                    "a tensor: the cache knows the object, and not what it holds",
                    hint="Call it as it is without its cache: function.__wrapped__(tensor).",
                )
            if not self._computing:  # only the run that fills the cache reads what a result was made from
                self._record.cached_calls.append(functools.partial(cache, *args, **kwargs))
            entries, key = entries_of(cache), _key_of(cache, args, kwargs)
            if (found := dict.get(entries, key, Mark.ABSENT)) is not Mark.ABSENT:
                self._record.fact(Kind.ITEM, entries, key, found)
                result = cache(*args, **kwargs)
                self._record.see(result)
                return result
            fact = self._record.fact(Kind.MEMO, entries, key, None)
            place = id(cache), key
            if place not in self._computed:
                self._computing += 1
                try:
                    self._computed[place] = compute(*args, **kwargs)
                finally:
                    self._computing -= 1
            fact.value, fact.recall = self._computed[place], functools.partial(cache, *args, **kwargs)
            return self._computed[place]

        return answer

    def forget(self) -> None:
        """Drop all results."""
        self._computed.clear()


def _has_values(given: Any) -> bool:
    return any(is_a(each, VALUES) or (is_a(each, (tuple, frozenset)) and _has_values(each)) for each in given)


def _key_of(cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the key under which a cache keeps the result for these arguments, by asking a cache like it."""
    copied = functools.lru_cache(maxsize=None, typed=cache.cache_parameters()["typed"])(lambda *_, **__: None)
    copied(*args, **kwargs)
    return next(iter(entries_of(copied)))
