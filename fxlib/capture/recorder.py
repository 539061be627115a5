"""Records what of Python's state a forward reads while it is captured, and notices what it leaves behind there.

All functions of the user's that run meanwhile run from instrumented code (`instrument`). What they read of objects that
were there before becomes a fact, which a captured module checks before each run. What differs when the capture ends
has been changed by the forward: it is put back, and the capture refused.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import gc
import inspect
import operator
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import Attribute

from fxlib.capture import source
from fxlib.capture.faults import fault
from fxlib.capture.instrument import ENTRY, IS_KNOWN, Observer, globals_of, instrumented
from fxlib.capture.intercept import is_capturing, suspended
from fxlib.errors import CaptureError
from fxlib.runtime.capture_guards import (
    GRAD_MODE,
    ArgumentFact,
    Fact,
    Facts,
    Kind,
    Mark,
    attributes_of,
    contents_of,
    is_array,
)
from fxlib.runtime.walk import local_modules

if TYPE_CHECKING:
    from fxlib.capture.tracer import RemoteTracer

_CONTAINERS = (list, dict, set, deque, bytearray)
_STATELESS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice, CodeType, torch.dtype, torch.device}
    | {torch.Size, torch.layout, torch.memory_format}
)
_VALUES = (Proxy, Node, torch.Tensor)
"""What a graph is made of: to read it is no fact of Python's."""
_TABLES = ("_parameters", "_buffers", "_modules")
_HEAP_TYPE = 1 << 9
_LRU_CACHE: type = type(functools.lru_cache(int))
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
_WRITING_METHODS = frozenset(
    {"update", "pop", "popitem", "clear", "append", "extend", "insert", "remove", "__setitem__"}
)
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
_MACHINERY = frozenset(
    {"threading", "_thread", "queue", "_queue", "logging", "weakref", "_weakref", "concurrent", "socket", "_socket"}
    | {"io", "_io", "multiprocessing", "asyncio", "_asyncio", "warnings", "contextvars", "_contextvars"}
)
"""Modules of Python's whose objects serve the program, and decide nothing of what it computes."""
_PLUMBING = frozenset(
    {"__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "__getattr__", "__setattr__", "__delattr__"}
    | {"__init__", "__setstate__", "_apply", "apply", "to", "train", "requires_grad_", "register_buffer"}
)
"""Methods of nn.Module whose reading is known, or is none of the forward's."""
_NO_CODE = compile("", "", "exec")
_MODULES = f"{source.TORCH}nn/modules/"
_NOT_OBSERVED = (source.TORCH, source.CAPTURE.removesuffix("capture/"), "<frozen", "<eval_with_key>")


_Path = tuple[str, tuple[tuple[str, Any], ...], Node]
"""The name of an argument (empty: the model), the steps from there to a part of it, and the argument's node."""


class _Current:
    """The recorder of the capture that runs: instrumented code asks for it, and may outlive the capture."""

    recorder: Recorder | None = None


def _observer(name: str) -> Observer:
    """Return the function that hands what it is given to one of the recorder's methods."""

    def observe(*operands: Any) -> None:
        recorder = _Current.recorder
        if recorder is not None and recorder.listens():
            recorder.observe(name, operands)

    return observe


def _called(function: Any, *operands: Any) -> Any:
    """Return what is to be called in place of `function`."""
    recorder = _Current.recorder
    if recorder is None or not recorder.listens():
        return function
    return recorder.observe("called", (function, *operands))


def _entry(function: FunctionType | None, scope: dict[str, Any], names: tuple[str, ...]) -> Observer:
    """Return the observer of a function's beginning: what it reads by name is noted, the first time."""
    begun: Recorder | None = None

    def enter() -> None:
        nonlocal begun
        recorder = _Current.recorder
        if recorder is not None and recorder is not begun and recorder.listens(function):
            begun = recorder
            recorder.observe("begun", (function, scope, names))

    return enter


_OBSERVERS: Mapping[str, Observer] = {
    **{name: _observer(name) for name in ("attribute", "stored", "item", "item_stored", "contained", "identity")},
    **{name: _observer(name) for name in ("operands", "truth", "none", "contents", "matched", "formatted")},
    **{name: _observer(name) for name in ("entered", "global_stored")},
    "called": _called,
}


def original_code(function: FunctionType) -> CodeType:
    """Return the code that a function has but for the time of a capture."""
    recorder = _Current.recorder
    return function.__code__ if recorder is None else recorder.swapped.get(function, function.__code__)


class Recorder:
    """What one capture has read. Between `__enter__` and `__exit__`, it sees all that instrumented functions do.

    Args:
        model: the model, or a function. Its own modules are watched by `state.unchanged`, too.
        also: functions that an earlier attempt has met too late.
    """

    def __init__(self, model: object, also: tuple[FunctionType, ...] = ()) -> None:
        self.busy = False
        self.asked_grad_mode = False
        """Whether the forward behaves otherwise where no gradients are recorded."""
        self.tracer: RemoteTracer | None = None
        """Makes the graph; None where an export does."""
        self._model, self._also, self._active = model, also, False
        forward = type(model).forward if isinstance(model, nn.Module) else model
        self._roots = set(_functions_in(forward))
        modules = [each for _, each in local_modules(model)] if isinstance(model, nn.Module) else []
        tables = [table for each in modules for table in (each._parameters, each._buffers)]
        self._state = {id(value) for table in tables for value in table.values()}
        self._modules = {id(each) for each in modules}
        self._tracked: dict[int, Any] = {}
        self._facts: dict[tuple[Kind, int, Any], Fact] = {}
        self._arguments: list[tuple[_Path, str, Any, _Path | None]] = []
        self._looked_up: dict[tuple[type, str], Any] = {}
        self._classes: set[type] = set()
        self._asked_tensors: dict[int, torch.Tensor] = {}
        self._special_classes: set[type] = set()
        self._ran: set[CodeType] = set()
        self._imported = set(sys.modules)
        self.swapped: dict[FunctionType, CodeType] = {}
        self._made: list[weakref.ref[Proxy]] = []
        self._caches: dict[int, tuple[Any, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        changed = self._restore()
        if error is None and changed:
            fact = changed[0]
            raise CaptureError(
                f"the forward changes {fact}, so one step would depend on the last",
                where=fact.where or source.of_definition(getattr(type(self._model), "forward", self._model)),
                hint="Return the value instead, or do this outside of the forward.",
            )

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Let the user's functions run from instrumented code during the block."""
        outer = sys.getprofile()
        profiler = cProfile.Profile(subcalls=False, builtins=False)
        collecting = gc.isenabled()
        gc.disable()  # what runs at a collection is none of the forward's
        try:
            _Current.recorder = self
            self._discover_class(nn.Module)
            for function in self._also:
                self._discover_function(function)
            if isinstance(self._model, nn.Module):
                for _, module in local_modules(self._model):
                    self._discover_class(type(module))
            else:
                self._see(self._model)
            profiler.enable()
            yield
        finally:
            profiler.disable()
            _resume(outer)
            if collecting:
                gc.enable()
            _Current.recorder = None
            codes = (each.code for each in profiler.getstats() if isinstance(each.code, CodeType))
            self._ran = {each for each in codes if _is_users(each) and not _is_instrumented(each)}
            for function, code in self.swapped.items():
                function.__code__ = code

    def listens(self, function: FunctionType | None = None) -> bool:
        """Whether what happens now is the forward's doing: from when its first `function` begins."""
        if self.busy or not is_capturing():
            return False
        self._active = self._active or function in self._roots
        return self._active

    def observe(self, name: str, operands: tuple[Any, ...]) -> Any:
        """Handle one observation; what the recorder itself does meanwhile is none."""
        self.busy = True
        try:
            return getattr(self, f"_{name}")(*operands)
        finally:
            self.busy = False

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Take what happens in the block for the capture's own doing."""
        busy, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = busy

    # The result.

    def handed_on(self, container: Any) -> None:
        """Note a container that becomes part of the graph as it is now."""
        with self.unobserved():
            self._deep(container)

    def note_made(self, proxy: Proxy) -> None:
        """Note a stand-in for a value, which nothing may keep when the capture is over."""
        self._made.append(weakref.ref(proxy))

    def refuse_leaks(self) -> None:
        """See to it that no stand-in is left anywhere, as the original would meet it.

        Raises:
            CaptureError: something keeps one.
        """
        self._tracked.clear()
        if self.tracer is not None:
            self.tracer.forget()
            self.tracer = None
        if any(made() is not None for made in self._made):
            gc.collect()
        for proxy in [each for made in self._made if (each := made()) is not None]:
            holders = sorted({type(each).__name__ for each in gc.get_referrers(proxy)})
            raise CaptureError(
                f"the forward leaves {proxy}, a value of one step, in a {' or '.join(holders)} that outlives it",
                where=str(proxy.node.meta.get("source", "")),
                hint="Keep it out of what lives longer than a step, or fill that before the capture.",
            )

    def facts(self, graph: Graph) -> Facts:
        """Return what is to be watched of the state that was read while `graph` was made.

        Raises:
            CaptureError: an argument decides which way the program goes, and is written to.
        """
        for fact in self._facts.values() if self._asked_tensors else ():
            if fact.value is Mark.TENSOR and id(fact.now()) in self._asked_tensors:
                fact.value = fact.now()  # no other one would do
        if not IS_KNOWN:
            return Facts.unread((each for _, each in local_modules(self._root())), graph)
        return Facts(tuple(self._facts.values()), tuple(self._argument_facts(graph)))

    def _root(self) -> nn.Module:
        return self._model if isinstance(self._model, nn.Module) else nn.Module()

    def met_late(self) -> tuple[FunctionType, ...] | None:
        """Return functions to be observed from the start of another attempt; None if this one has seen all.

        They come from where nobody looked, such as a table of hooks, or ran while a module was imported.
        """
        own = {each.__code__ for base in type(self.tracer).__mro__ for each in _all_functions(base)}
        files = {getattr(sys.modules[name], "__file__", None) for name in sys.modules.keys() - self._imported}
        codes = self._ran - own
        ran_at_import = {each for each in codes if each.co_filename in files}
        codes -= ran_at_import
        found = [each for each in gc.get_referrers(*codes) if type(each) is FunctionType] if codes else []
        found = [each for each in found if not _is_generated_elsewhere(each)]
        return (*self._also, *found) if IS_KNOWN and (found or ran_at_import) else None

    # Places, and the values in them.

    def _fact(self, kind: Kind, owner: Any, key: Any, value: Any) -> Fact:
        place = (kind, id(owner), key)
        if _is_ours(value):  # what makes a call, such as rpc_sync: the graph's own operators ask for it at each run
            return Fact(kind, owner, key, value)
        if (known := self._facts.get(place)) is None:
            self._tracked.setdefault(id(owner), owner)
            known = self._facts[place] = Fact(kind, owner, key, value)
            self._see_contents(value)
        return known

    def _see_contents(self, value: Any) -> None:
        if type(value) is tuple:
            for each in value:
                self._see_contents(each)
        else:
            self._see(value)

    def _see(self, value: Any) -> None:
        """Take note of a value that was there before the capture: what is read of it is a fact, too."""
        kind = type(value)
        if kind in _STATELESS or kind is Mark or id(value) in self._tracked or issubclass(kind, (Proxy, Node)):
            return
        self._tracked[id(value)] = value
        if issubclass(kind, torch.Tensor):
            return
        if issubclass(kind, tuple):
            for each in value:
                self._see(each)
        if issubclass(kind, type):
            self._discover_class(value)
        self._note_cache(value)
        for function in _functions_in(value):
            self._discover_function(function)
        if kind is MethodType:
            self._see(value.__self__)
        elif kind is functools.partial:
            for each in (value.func, *value.args, *value.keywords.values()):
                self._see(each)
        self._discover_class(kind)

    def _path_in_graph(self, tensor: torch.Tensor) -> str | None:
        """Return the path by which the graph reads a plain tensor of the model's, at each run."""
        return None if self.tracer is None else self.tracer.tensor_attrs.get(tensor)

    def _knows(self, value: Any) -> bool:
        """Whether a value was there before the capture."""
        return id(value) in self._tracked or id(value) in self._modules or isinstance(value, (type, ModuleType))

    # Functions and classes, as they come up.

    def _note_cache(self, value: Any) -> None:
        """Note a function with a cache of its results: what it keeps of a capture is forgotten."""
        kind: type = type(value)
        if kind is _LRU_CACHE:
            self._caches.setdefault(id(value), (value, value.cache_info().misses))

    def _discover_class(self, kind: type) -> None:
        if kind in self._classes:
            return
        self._classes.add(kind)
        for base in kind.__mro__:
            if base.__flags__ & _HEAP_TYPE and not _is_fx(base.__module__):
                for value in list(base.__dict__.values()):
                    self._note_cache(value)
                    for function in _functions_in(value):
                        self._discover_function(function)

    def _discover_function(self, function: FunctionType) -> None:
        code = function.__code__
        if function in self.swapped or _is_instrumented(code) or not IS_KNOWN:
            return
        if not is_observed(code) or _is_generated_elsewhere(function):
            return
        made, names = _instrumented(code, function.__globals__)
        self.swapped[function] = code
        function.__code__ = _with_entry(made, _entry(function, function.__globals__, names))

    def _begun(self, function: FunctionType | None, scope: dict[str, Any], names: tuple[str, ...]) -> None:
        """A function runs for the first time: its globals, the variables of its closure and its defaults are read."""
        for name in names:
            value = scope.get(name, Mark.ABSENT)
            self._fact(Kind.ITEM, scope, name, value)
            if value is Mark.ABSENT:
                builtins = scope.get("__builtins__", {})
                table = builtins if isinstance(builtins, dict) else vars(builtins)
                self._see(table.get(name))
        if function is None:
            return
        for name, cell in zip(self.swapped[function].co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                value = Mark.ABSENT
            self._fact(Kind.CELL, cell, name, value)
        if function.__defaults__ or function.__kwdefaults__:
            fact = self._fact(Kind.DEFAULTS, function, function.__name__, None)
            fact.value = (function.__defaults__, function.__kwdefaults__)
            for each in function.__defaults__ or ():
                self._see(each)
            if function.__kwdefaults__:
                self._see(function.__kwdefaults__)
                self._contents(function.__kwdefaults__)

    def value_asked(self, tensor: torch.Tensor) -> None:
        """Note that the elements of a tensor were looked at, which no node of the graph reads."""
        self._asked_tensors[id(tensor)] = tensor
        self._fact(Kind.VALUE, tensor, None, tensor.detach().clone())

    # What instructions read. Each method is given the operands.

    def _attribute(self, name: str, owner: Any) -> None:
        kind = type(owner)
        if kind in _STATELESS or issubclass(kind, _VALUES):
            return
        if issubclass(kind, ModuleType):
            self._attribute_of_module(name, owner)
        elif issubclass(kind, type):
            self._attribute_of_class(name, owner)
        else:
            self._attribute_of_instance(name, owner)

    def _attribute_of_module(self, name: str, owner: ModuleType) -> None:
        if name in attributes_of(owner) or type(owner) is ModuleType:
            self._fact(Kind.ATTRIBUTE, owner, name, attributes_of(owner).get(name, Mark.ABSENT))
        else:
            self._getter(name, owner)

    def _attribute_of_class(self, name: str, owner: type) -> None:
        for base in owner.__mro__:
            if base.__flags__ & _HEAP_TYPE:
                found = base.__dict__.get(name, Mark.ABSENT)
                self._fact(Kind.CLASS, base, name, found)
                if found is not Mark.ABSENT:
                    return
        if type(owner) is not type:
            self._getter(name, owner)

    def _on_class(self, name: str, kind: type) -> Any:
        """Return what the class of an object, or one of its bases, has under a name; that is a fact of each."""
        if (kind, name) not in self._looked_up:
            found: Any = Mark.ABSENT
            for base in kind.__mro__:
                found = base.__dict__.get(name, Mark.ABSENT)
                if base.__flags__ & _HEAP_TYPE:
                    self._fact(Kind.CLASS, base, name, found)
                if found is not Mark.ABSENT:
                    break
            self._looked_up[kind, name] = found
        return self._looked_up[kind, name]

    def _attribute_of_instance(self, name: str, owner: Any) -> None:
        kind = type(owner)
        if issubclass(kind, tuple) and not kind.__dictoffset__:
            return
        found = self._on_class(name, kind)
        if not self._knows(owner):
            self._discover_class(kind)
            return
        if found is not Mark.ABSENT and (hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")):
            self._described(name, owner, found)
            return
        if name == "__dict__":
            self._see(attributes_of(owner))
            return
        if kind.__dictoffset__:
            if name == "training" and isinstance(owner, nn.Module):
                return  # a condition for all modules
            value = attributes_of(owner).get(name, Mark.ABSENT)
            if (
                id(owner) in self._modules
                and isinstance(value, torch.Tensor)
                and self._path_in_graph(value) is not None
            ):
                self._fact(Kind.ATTRIBUTE, owner, name, Mark.TENSOR)
                return
            self._fact(Kind.ATTRIBUTE, owner, name, value)
            if value is not Mark.ABSENT:
                return
        if found is Mark.ABSENT:
            self._missing(name, owner)

    def _described(self, name: str, owner: Any, descriptor: Any) -> None:
        """A descriptor of the user's own runs, observed; another one is asked again before each run."""
        if name == "__dict__":
            self._see(attributes_of(owner))
        elif name != "__class__" and not any(is_observed(each.__code__) for each in _functions_in(descriptor)):
            self._getter(name, owner)

    def _missing(self, name: str, owner: Any) -> None:
        if isinstance(owner, nn.Module):
            tables = [attributes_of(owner).get(each, {}) for each in _TABLES]
            holding = [table for table in tables if name in table]  # no more than one: nn.Module sees to that
            for table in holding or tables:
                value = table.get(name, Mark.ABSENT)
                self._fact(Kind.ITEM, table, name, Mark.TENSOR if isinstance(value, torch.Tensor) else value)
        elif not _is_torch(type(owner).__module__) and not any(
            is_observed(each.__code__) for each in _functions_in(getattr(type(owner), "__getattr__", None))
        ):
            self._getter(name, owner)

    def _getter(self, name: str, owner: Any) -> None:
        with suspended():
            value = getattr(owner, name, Mark.ABSENT)
        if not isinstance(value, (MethodType, BuiltinFunctionType, *_VALUES)):
            self._fact(Kind.GETTER, owner, name, value)

    def _item(self, container: Any, key: Any) -> None:
        if not self._knows(container):
            return
        if isinstance(container, dict):
            try:
                self._entry_of(container, key)
            except TypeError:  # a key that cannot be one
                return
        else:
            self._contents(container)

    def _entry_of(self, table: dict[Any, Any], key: Any) -> Fact:
        return self._fact(Kind.ITEM, table, key, dict.get(table, key, Mark.ABSENT))

    def _contained(self, key: Any, container: Any) -> None:
        self._item(container, key)

    def _contents(self, value: Any, *_: Any) -> Fact | None:
        """What a container holds is looked at."""
        if type(value) in _STATELESS or isinstance(value, (*_VALUES, type, nn.Module)) or not self._knows(value):
            return None
        self._special(type(value))
        if isinstance(value, _CONTAINERS) or is_array(value):
            held = contents_of(value)
            if isinstance(value, dict) and value is not None:
                held = tuple((key, self._or_mark(each)) for key, each in held)
            return self._fact(Kind.CONTENTS, value, None, held)
        if hasattr(type(value), "__next__"):
            raise fault(
                f"the forward takes elements from a {type(value).__name__} that was there before, and changes it",
                hint="Make it in the forward, or take the elements before.",
            )
        return None

    def _or_mark(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return Mark.TENSOR if id(value) in self._state or self._path_in_graph(value) is not None else value

    def _deep(self, value: Any, seen: set[int] | None = None) -> None:
        """Whatever can be reached from a value may be looked at, but modules, functions and classes."""
        seen = set() if seen is None else seen
        kind = type(value)
        if kind in _STATELESS or id(value) in seen or isinstance(value, (*_VALUES, type, ModuleType, nn.Module)):
            return
        if kind.__module__.partition(".")[0] in _MACHINERY:
            return
        seen.add(id(value))
        self._special(kind)
        if isinstance(value, (FunctionType, MethodType)):
            return
        if isinstance(value, BuiltinFunctionType):
            self._deep(value.__self__, seen)
            return
        self._contents_if_any(value)
        for each in _elements(value):
            self._deep(each, seen)
        if kind.__dictoffset__ and not isinstance(value, functools.partial):
            held = attributes_of(value)
            if self._knows(value):
                self._see(held)
                self._contents(held)
            for each in list(held.values()):
                self._deep(each, seen)

    def _contents_if_any(self, value: Any) -> None:
        if isinstance(value, _CONTAINERS) or is_array(value):
            self._contents(value)

    def _truth(self, value: Any) -> None:
        kind = type(value)
        if kind in _STATELESS or issubclass(kind, _VALUES):
            return
        self._contents_if_any(value)
        if kind.__flags__ & _HEAP_TYPE and self._on_class("__bool__", kind) is Mark.ABSENT:
            self._on_class("__len__", kind)

    def _special(self, kind: type) -> None:
        """An object is given to an operator, or to a function in C: these look up special methods on its class."""
        if kind in self._special_classes or not kind.__flags__ & _HEAP_TYPE or _is_fx(kind.__module__):
            return
        self._special_classes.add(kind)
        for base in kind.__mro__:
            if base.__flags__ & _HEAP_TYPE and base is not nn.Module:
                for name, value in list(base.__dict__.items()):
                    if name.startswith("__") and callable(value):
                        self._fact(Kind.CLASS, base, name, value)

    def _operands(self, *values: Any) -> None:
        for value in values:
            if type(value) not in _STATELESS:
                self._deep(value)

    def _formatted(self, value: Any, *_: Any) -> None:
        self._operands(value)

    def _entered(self, manager: Any) -> None:
        self._discover_class(type(manager))

    def _matched(self, subject: Any, kind: Any, names: tuple[str, ...]) -> None:
        for name in (*names, *getattr(kind, "__match_args__", ())):
            self._attribute(name, subject)

    # What instructions write.

    def _stored(self, name: str, owner: Any) -> None:
        if id(owner) in self._modules or not self._knows(owner) or isinstance(owner, _VALUES):
            return  # modules are watched whole
        if isinstance(owner, type):
            fact = self._fact(Kind.CLASS, owner, name, owner.__dict__.get(name, Mark.ABSENT))
        else:
            found = self._on_class(name, type(owner))
            if hasattr(type(found), "__set__") and not isinstance(found, property):
                fact = self._fact(Kind.GETTER, owner, name, getattr(owner, name, Mark.ABSENT))
            elif hasattr(type(found), "__set__") or not type(owner).__dictoffset__:
                return
            else:
                fact = self._fact(Kind.ATTRIBUTE, owner, name, attributes_of(owner).get(name, Mark.ABSENT))
        fact.where = fact.where or source.here()

    def _item_stored(self, container: Any, key: Any) -> None:
        if not self._knows(container) or isinstance(container, _VALUES):
            return
        fact = self._entry_of(container, key) if isinstance(container, dict) else self._contents(container)
        if fact is not None:
            fact.where = fact.where or source.here()

    def _global_stored(self) -> None:
        pass  # noted where the function began

    # What is called.

    def _called(self, function: Any, *operands: Any) -> Any:
        """Return what is to be called: a function whose results are cached, without its cache."""
        kind = type(function)
        if issubclass(kind, _VALUES):
            for each in operands:
                self._deep(each)
            return function
        if kind is MethodType:
            inner = self._called(function.__func__, function.__self__, *operands)
            return function if inner is function.__func__ else MethodType(inner, function.__self__)
        if kind is _LRU_CACHE:
            self._see(function)
            return self._called(function.__wrapped__, *operands)
        if kind is FunctionType:
            self._discover_function(function)
            return function if _is_instrumented(function.__code__) else self._leaf(function, operands)
        if operands and isinstance(operands[0], Proxy) and _hashable(function) and function in _OF_TRACED:
            return self._of_traced(function, operands[0], operands[1:])
        if isinstance(function, type):
            self._discover_class(function)
            self._constructed(function, operands)
            return function
        return self._called_in_c(function, operands)

    def _called_in_c(self, function: Any, operands: tuple[Any, ...]) -> Any:
        kind = type(function)
        if kind is BuiltinFunctionType:
            owner = function.__self__
            if owner is None or isinstance(owner, (ModuleType, type)):
                return self._leaf(function, operands)
            self._method(owner, function.__name__, operands)
        elif kind in _WRAPPERS:
            bound = hasattr(function, "__self__")
            if bound or operands:
                owner, rest = (function.__self__, operands) if bound else (operands[0], operands[1:])
                self._method(owner, function.__name__, rest)
        elif kind is functools.partial:
            if self._knows(function):
                self._see(function)
            self._called(function.func, *function.args, *operands)
        else:
            self._discover_class(kind)
            self._special(kind)
            if isinstance(function, nn.Module):
                if function is not self._model:
                    self._on_class("forward", kind)
            elif not isinstance(kind.__call__, FunctionType):  # written in C, such as NumPy's functions
                self._object_in_c(function, operands)
        return function

    def _object_in_c(self, function: Any, operands: tuple[Any, ...]) -> None:
        """An object that is written in C is called."""
        if isinstance(function, weakref.ref):
            self._see(function())
        for path in function.__reduce__()[1] if isinstance(function, operator.attrgetter) else ():
            owner = operands[0]
            for name in path.split("."):
                self._attribute(name, owner)
                owner = getattr(owner, name)
        for each in operands:
            self._deep(each)

    def _constructed(self, kind: type, operands: tuple[Any, ...]) -> None:
        if kind in _READS_NOTHING or issubclass(kind, (Proxy, nn.Module)) or kind is type:
            return
        for each in operands:
            if kind in _SHALLOW or kind.__module__ == "itertools":
                self._contents_of_argument(each)
            elif not kind.__flags__ & _HEAP_TYPE or not is_observed(_code_of(kind.__init__)):
                self._deep(each)
        if kind is torch.Generator:
            raise fault(
                "the forward makes a random generator, which a graph would not make anew at each run",
                hint="Make it before, and keep it as an attribute of the model.",
            )

    def _contents_of_argument(self, value: Any) -> None:
        if isinstance(value, BuiltinFunctionType):
            self._deep(value)
        elif isinstance(value, (tuple, list)) and not self._knows(value):  # of a call with a star
            for each in value:
                self._contents(each)
        else:
            self._contents(value)

    def _method(self, owner: Any, name: str, operands: tuple[Any, ...]) -> None:
        """A method that is written in C."""
        if isinstance(owner, _VALUES):
            return
        if name in ("__getattribute__", "__getattr__") and operands and isinstance(operands[0], str):
            self._attribute(operands[0], owner)
            return
        if name in ("__setattr__", "__delattr__") and operands and isinstance(operands[0], str):
            self._stored(operands[0], owner)
            return
        if isinstance(owner, dict) and name in _ITEM_METHODS and operands:
            self._item_stored(owner, operands[0]) if self._knows(owner) else None
        elif self._knows(owner) and (fact := self._contents(owner)) is not None:
            fact.where = fact.where or source.here()
        elif isinstance(owner, torch.Generator) and name in ("manual_seed", "seed", "set_state"):
            raise fault(
                "the forward seeds a random generator, which a graph would not do at each run",
                hint="Seed it before the forward.",
            )
        for each in operands:
            self._deep(each)

    def _leaf(self, function: Any, operands: tuple[Any, ...]) -> Any:
        """A function that is not looked into: torch's, Python's, or one in C."""
        module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
        if not _hashable(function) or (_code_of(function) or _NO_CODE).co_filename.startswith(source.CAPTURE):
            return function  # the latter is intercepted
        if function in _BY_NAME:
            return self._by_name(function, operands)
        if _is_torch(module):
            return self._torchs(function, name, operands)
        if module.partition(".")[0] in _OTHER_AT_EACH_RUN and name not in _CONSTANT_OS and "path" not in module:
            self._other_at_each_run(f"{module}.{name}")
        if function is vars and operands:
            self._see(attributes_of(operands[0])) if self._knows(operands[0]) else None
            self._deep(attributes_of(operands[0]))
        for each in operands if function not in _READS_NOTHING else ():
            if function in _SHALLOW:
                self._contents_of_argument(each)
            else:
                self._deep(each)
        return function

    @staticmethod
    def _other_at_each_run(name: str) -> None:
        raise fault(
            f"the forward calls {name}, whose answer may be another at each run, and a graph keeps one",
            hint="Call it before the forward, or make what calls it a leaf with wrap=.",
        )

    def _by_name(self, function: Any, operands: tuple[Any, ...]) -> Any:
        owner, name, *_ = operands if len(operands) > 1 else (None, None)
        if isinstance(name, str) and not isinstance(owner, _VALUES):
            self._attribute(name, owner) if function in (getattr, hasattr) else self._stored(name, owner)
        return function

    def _torchs(self, function: Any, name: str, operands: tuple[Any, ...]) -> Any:
        if name in GRAD_MODE:
            self.asked_grad_mode = True
        elif name in _TRACING:
            return lambda *_, **__: False
        elif name.startswith(_QUESTIONS) and all(type(each) in _STATELESS for each in operands):
            with suspended(), contextlib.suppress(Exception):  # which the call itself will raise
                answer = function(*operands)
                if type(answer) in _STATELESS:
                    self._fact(Kind.QUESTION, function, operands, answer)
        else:
            for each in operands:
                if isinstance(each, (*_CONTAINERS, tuple)):
                    self._deep(each)
        return function

    # Arguments.

    def _identity(self, one: Any, other: Any) -> None:
        """Traced values are never what they are compared with, unless it is one and the same: a run has to agree."""
        if one is other or self.tracer is None:
            return
        if isinstance(one, Proxy) and isinstance(other, Proxy):
            self._apart(one, other)
        elif isinstance(one, Proxy) or isinstance(other, Proxy):
            proxy, value = (one, other) if isinstance(one, Proxy) else (other, one)
            if (path := _path_of(proxy)) is not None:
                self._arguments.append((path, "is not", value, None))
            else:
                self.class_of(proxy)  # refuses what only a run knows

    def _apart(self, one: Proxy, other: Proxy) -> None:
        paths = _path_of(one), _path_of(other)
        if paths[0] is None or paths[1] is None:
            raise fault(
                "two traced values are compared by identity, and only a run knows whether they are one",
                hint="Move the decision out of the forward.",
            )
        self._arguments.append((paths[0], "is not", None, paths[1]))

    def _none(self, value: Any) -> None:
        self._identity(value, None)

    def class_of(self, proxy: Proxy, *, exact: bool = False) -> type:
        """Return the class that a traced value surely has; what that takes for granted of arguments is noted.

        Raises:
            CaptureError: only a run knows it.
        """
        if self.tracer is None:
            raise AssertionError("nothing is traced")
        asked: type = self.tracer.class_of_value(proxy)
        if exact and (path := _path_of(proxy)) is not None:
            self._arguments.append((path, "type is", asked, None))
        return asked

    def rely_on_class(self, node: Node, kind: type) -> None:
        """Note that an argument was taken to be of a class."""
        self._arguments.append(((str(node.target).lstrip("*"), (), node), "isinstance", kind, None))

    def _of_traced(self, function: Any, proxy: Proxy, operands: tuple[Any, ...]) -> Any:
        """What a run answers about a traced value, where the stand-in would answer otherwise."""
        if function is type:
            kind = self.class_of(proxy, exact=True)
            return lambda _: kind
        if function is hasattr and operands:
            has = hasattr(self.class_of(proxy), operands[0])
            return lambda *_: has
        if function is callable:
            has = hasattr(self.class_of(proxy), "__call__")  # noqa: B004
            return lambda _: has
        if function is getattr and len(operands) > 1 and not hasattr(self.class_of(proxy), operands[0]):
            return lambda *_: operands[1]
        return function

    def _argument_facts(self, graph: Graph) -> Iterator[ArgumentFact]:
        written = {node.args[0] for node in graph.nodes if _writes(node)}
        facts = {}
        for path, test, value, other in self._arguments:
            for each in filter(None, (path, other)):
                if each[2] in written:
                    raise fault(
                        f"the argument {each[0]} is written to, and a part of it decides which way the program goes",
                        hint="Decide by a value that the forward does not change.",
                    )
            key = (path[:2], test, id(value), None if other is None else other[:2])
            fact = ArgumentFact(
                name=path[0], steps=path[1], test=test, value=value, other=None if other is None else other[:2]
            )
            if not fact.name and (broken := fact.broken({"": self._model})):
                raise fault(broken, hint="Decide it before the capture, and keep it as an attribute of the model.")
            facts[key] = fact
        yield from facts.values()

    # The end.

    def _restore(self) -> list[Fact]:
        """Put back what the forward has changed, and return those facts."""
        for cache, misses in self._caches.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        changed = []
        for place, fact in list(self._facts.items()):
            if fact.holds():
                continue
            if fact.kind is Kind.QUESTION or _is_ours(fact.value):
                fact.value = fact.now()  # as it is outside of the trace
                continue
            fact.restore()
            if not _is_cache(fact):
                changed.append(fact)
            self._facts[place] = fact
        return changed


def _path_of(proxy: Proxy) -> _Path | None:
    """Return the way to an argument, a part of one, or state of the model's; None of what the forward computes."""
    if isinstance(proxy, Attribute):
        found = _path_of(proxy.root)
        return None if found is None else (found[0], (*found[1], ("getattr", proxy.attr)), found[2])
    return _path_of_node(proxy.node)


def _path_of_node(node: Node) -> _Path | None:
    if node.op == "placeholder":
        return str(node.target).lstrip("*"), (), node
    if node.op == "get_attr":
        return "", tuple(("getattr", part) for part in str(node.target).split(".")), node
    step = {getattr: "getattr", operator.getitem: "getitem"}.get(node.target)  # type: ignore[arg-type]
    step = "get" if node.op == "call_method" and node.target == "get" and not node.kwargs else step
    if step is None or len(node.all_input_nodes) != 1 or not isinstance(node.args[0], Node):
        return None
    found = _path_of_node(node.args[0])
    key: Any = node.args[1:] if step == "get" else node.args[1]
    return None if found is None else (found[0], (*found[1], (step, key)), found[2])


def _writes(node: Node) -> bool:
    """Whether a node changes what a container or an object holds."""
    return node.target is operator.setitem or (node.op == "call_method" and node.target in _WRITING_METHODS)


def _instrumented(code: CodeType, scope: dict[str, Any]) -> tuple[CodeType, tuple[str, ...]]:
    """Return the code with observers, but that of its beginning, and the global names that it reads."""
    key = code, code.co_filename
    if key in _of_torch:
        return _of_torch[key]

    def nested(inner: CodeType) -> CodeType:
        made, names = _instrumented(inner, scope)
        return _with_entry(made, _entry(None, scope, names))

    made = instrumented(code, _OBSERVERS, nested), globals_of(code)
    if code.co_filename.startswith(_MODULES):
        _of_torch[key] = made
    return made


_of_torch: dict[tuple[CodeType, str], tuple[CodeType, tuple[str, ...]]] = {}
"""The instrumented code of torch's own modules, which every capture needs."""


def is_observed(code: CodeType | None) -> bool:
    """Whether a function of this code is looked into: the user's, and those of torch's own modules."""
    return code is not None and _observed(code.co_filename, code.co_name)


@functools.cache
def _observed(file: str, name: str) -> bool:
    if file.startswith(_MODULES):
        return name not in _PLUMBING
    if file.startswith(_NOT_OBSERVED) or "/site-packages/numpy/" in file or source.GENERATED in file:
        return False
    return not file.startswith(source.STANDARD) or "-packages/" in file


def _hashable(function: Any) -> bool:
    """Whether a function may be looked up: one of a kind that compares by identity."""
    return type(function) in (FunctionType, BuiltinFunctionType) or isinstance(function, type)


def _is_users(code: CodeType) -> bool:
    """Whether code is that of a function, and neither torch's nor such as runs when a module is imported."""
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    return is_function and is_observed(code) and not code.co_filename.startswith(_MODULES)


def _code_of(function: Any) -> CodeType | None:
    """Return the code of a Python function; of anything else None, without asking it for attributes."""
    return function.__code__ if type(function) is FunctionType else None


def _with_entry(code: CodeType, entry: Observer) -> CodeType:
    return code.replace(co_consts=tuple(entry if each is ENTRY else each for each in code.co_consts))


def _is_generated_elsewhere(function: FunctionType) -> bool:
    """Whether a function was made from a text, as dataclasses make theirs, for a class that is not the user's."""
    package = str(function.__globals__.get("__name__", "")).partition(".")[0]
    if not function.__code__.co_filename.startswith("<") or package == "__main__":
        return False
    return package in ("torch", "fxlib", "numpy", *sys.stdlib_module_names) or package.startswith("namedtuple_")


def _is_instrumented(code: CodeType) -> bool:
    return any(type(each) is FunctionType and each.__module__ == __name__ for each in code.co_consts)


def _all_functions(kind: type) -> Iterator[FunctionType]:
    for value in list(kind.__dict__.values()):
        yield from _functions_in(value)


def _resume(profiler: Any) -> None:
    """Let go on what profiled this thread before."""
    if hasattr(profiler, "enable"):
        profiler.enable()
    elif profiler is not None:
        sys.setprofile(profiler)


def _functions_in(value: Any, depth: int = 0) -> Iterator[FunctionType]:
    """Yield the Python functions that a value is, or calls: of a method, a property, a decorated function."""
    kind = type(value)
    if kind is FunctionType:
        yield value
        if not is_observed(value.__code__) and depth < 3:
            for cell in value.__closure__ or ():
                try:
                    inner = cell.cell_contents
                except ValueError:
                    continue
                if type(inner) in (FunctionType, MethodType, _LRU_CACHE, functools.partial):
                    yield from _functions_in(inner, depth + 1)
    elif kind in (staticmethod, classmethod, MethodType):
        yield from _functions_in(value.__func__, depth)
    elif kind is functools.partial or kind is functools.partialmethod:
        yield from _functions_in(value.func, depth)
    elif isinstance(value, property):
        for each in (value.fget, value.fset, value.fdel):
            yield from _functions_in(each, depth)
    elif kind is functools.cached_property:
        yield from _functions_in(value.func, depth)
    elif kind is _LRU_CACHE:
        yield from _functions_in(value.__wrapped__, depth)


def _elements(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from list(dict.values(value))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from list(value)


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _is_fx(module: str) -> bool:
    return module.startswith(("torch.fx", "fxlib."))


def _is_ours(value: Any) -> bool:
    """Whether a value is what torch.fx or the capture has put in the place of another, for its own time."""
    code = _code_of(value)
    return code is not None and code.co_filename.startswith((f"{source.TORCH}fx/", source.CAPTURE))


def _is_cache(fact: Fact) -> bool:
    """Whether what was changed is a property that was computed for the first time."""
    return (
        fact.kind is Kind.ATTRIBUTE
        and fact.value is Mark.ABSENT
        and isinstance(getattr(type(fact.owner), str(fact.key), None), functools.cached_property)
    )
