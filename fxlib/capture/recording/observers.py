"""The functions that run from instrumented code while a forward is captured, and the listener to their observers.

Functions are found as they come up: in classes, closures, wrappers and globals. The user's functions and those of
torch's own modules have instrumented code (`instrument`) during the capture, whose observations go to the `Listener` of
the running capture. A hook in C notes, at little cost and beside other profilers, which other functions of the user
run.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

from fxlib.capture import source
from fxlib.capture.recording.instrument import ENTRY, Observer, globals_of, instrumented
from fxlib.errors import CaptureError
from fxlib.runtime.ops import contract_lookup

_Stop = Callable[[], Collection[CodeType]]
"""A function that ends the noting and returns the code that has run."""
HEAP_TYPE = 1 << 9
LRU_CACHE: type = type(functools.lru_cache(int))
_PLUMBING = frozenset(
    {"__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "__getattr__", "__setattr__", "__delattr__"}
    | {"__init__", "__setstate__", "_apply", "apply", "to", "train", "requires_grad_", "register_buffer"}
    | {"_update_flat_weights", "_weights_have_changed"}  # a recurrent module checks that its lists are up to date
)
"""Methods of nn.Module whose reads are known, or are not the forward's."""
_MODULES = (f"{source.TORCH}nn/modules/", f"{source.TORCH}nn/utils/parametri")
"""Beginnings of the paths of the code of torch's own modules, and of the parametrizations of their weights."""
_SETTINGS = f"{source.TORCH}backends/"
"""Beginning of the paths of the code with which torch answers for its settings."""
_TORCHS_LIBRARIES = frozenset(
    {"numpy", "sympy", "mpmath", "networkx", "optree", "jinja2", "filelock", "fsspec", "typing_extensions"}
)
"""Packages that torch is built on and runs itself; functions of these that a program calls are not looked into."""


def note_running() -> _Stop:
    """Note all code that runs in this thread from now on, until the returned function is called."""
    return _monitored() if hasattr(sys, "monitoring") else _profiled()


def _profiled() -> _Stop:
    """Use the only profiler that Python 3.11 allows; another one continues afterwards."""
    outer: Any = sys.getprofile()
    profiler = cProfile.Profile(subcalls=False, builtins=False)

    def stop() -> Collection[CodeType]:
        profiler.disable()
        if hasattr(outer, "enable"):
            outer.enable()
        elif outer is not None:
            sys.setprofile(outer)
        return [each.code for each in profiler.getstats() if isinstance(each.code, CodeType)]

    profiler.enable()
    return stop


def _monitored() -> _Stop:
    """Register as one of the several tools that Python allows since 3.12."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool, thread, ran = _free_tool(monitoring), threading.get_ident(), dict[int, CodeType]()

    def note(code: CodeType, *_: object) -> Any:
        if threading.get_ident() != thread:
            return None
        ran[id(code)] = code
        return monitoring.DISABLE  # once is enough for each position in the code

    events = monitoring.events.PY_START, monitoring.events.PY_RESUME
    for each in events:
        monitoring.register_callback(tool, each, note)

    def stop() -> Collection[CodeType]:
        monitoring.set_events(tool, 0)
        for each in events:
            monitoring.register_callback(tool, each, None)
        monitoring.free_tool_id(tool)
        return list(ran.values())

    monitoring.restart_events()  # code that an earlier capture has seen is reported again
    monitoring.set_events(tool, sum(events))
    return stop


def _free_tool(monitoring: Any) -> int:
    for tool in (4, 3, monitoring.PROFILER_ID, monitoring.OPTIMIZER_ID, monitoring.COVERAGE_ID, monitoring.DEBUGGER_ID):
        with contextlib.suppress(ValueError):  # the tool belongs to somebody else
            monitoring.use_tool_id(tool, "fxlib.capture")
            return int(tool)
    raise CaptureError(
        "six tools monitor this Python (sys.monitoring), and there is no room for a capture to see what runs",
        hint="Capture before they begin.",
    )


class Listener(Protocol):
    """The receiver of all observations that instrumented functions make."""

    def begin(self) -> None:
        """Find the first functions to observe."""

    def listens(self) -> bool:
        """Return whether the forward is running, so that observations count."""

    def observe(self, name: str, operands: tuple[Any, ...]) -> Any:
        """Handle one observation."""


class _Current:
    """Holds the listener of the running capture for instrumented code, which outlives the capture."""

    listener: Listener | None = None
    functions: ObservedFunctions | None = None
    capture: int = 0
    """Number of captures that have begun. Instrumented code keeps this number, as it must not keep a listener alive."""


def _observer(name: str) -> Observer:
    """Return a function that passes its arguments to one of the listener's methods."""

    def observe(*operands: Any) -> None:
        listener = _Current.listener
        if listener is not None and listener.listens():
            listener.observe(name, operands)

    return observe


def _called(function: Any, *operands: Any) -> Any:
    """Return the function to call in place of `function`."""
    listener = _Current.listener
    if listener is None or not listener.listens():
        return function
    return listener.observe("called", (function, *operands))


def _unpacked(function: Any, positional: Any, named: Any = None) -> Any:
    """Return the function to call in place of one that is given starred arguments."""
    given = tuple(positional) if type(positional) in (tuple, list) else (positional,)
    return _called(function, *given, *(named.values() if isinstance(named, dict) else ()))


def _entry(function: FunctionType | None, names: tuple[str, ...]) -> Observer:
    """Return the observer of a function's beginning, which notes what the function reads by name, the first time."""
    begun = 0
    held = None if function is None else weakref.ref(function)  # a function's code must not keep the function alive

    def enter() -> None:
        nonlocal begun
        listener = _Current.listener
        if listener is not None and begun != _Current.capture and listener.listens():
            begun = _Current.capture
            own = None if held is None else held()
            listener.observe("begun", (own, sys._getframe(1).f_globals, names))

    return enter


_OBSERVERS: Mapping[str, Observer] = {
    **{name: _observer(name) for name in ("attribute", "stored", "item", "item_stored", "contained", "identity")},
    **{name: _observer(name) for name in ("operands", "truth", "none", "contents", "matched", "formatted")},
    **{name: _observer(name) for name in ("entered", "imported", "global_stored", "cell_stored", "attribute_of_super")},
    "called": _called,
    "unpacked": _unpacked,
}


def original_code(function: FunctionType) -> CodeType:
    """Return the code that a function has outside of captures."""
    functions = _Current.functions
    return function.__code__ if functions is None else functions.swapped.get(function, function.__code__)


contract_lookup.ask_for_code(original_code)


class ObservedFunctions:
    """The functions that run from instrumented code in one capture."""

    def __init__(self, also: tuple[FunctionType, ...] = ()) -> None:
        """Observe `also` from the start: the functions that an earlier attempt met too late."""
        self.swapped: dict[FunctionType, CodeType] = {}
        self.caches: dict[int, tuple[Any, int, tuple[Any, ...]]] = {}
        """Functions that cache their results, by id, each with the number of misses and the keys that it knows."""
        self._also = also
        self._classes: set[type] = set()
        self._ran: dict[int, CodeType] = {}
        self._imported = set(sys.modules)

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Send the observations of instrumented functions to a listener during the block."""
        try:
            _Current.listener, _Current.functions = listener, self
            _Current.capture += 1
            for function in self._also:
                self.discover_function(function)
            listener.begin()
            yield
        finally:
            _Current.listener = _Current.functions = None
            for function, code in self.swapped.items():
                function.__code__ = code

    def note_others(self) -> Callable[[], None]:
        """Note which of the user's functions run unobserved until the returned function is called."""
        noted = note_running()

        def stop() -> None:
            self._ran = {id(each): each for each in noted() if _is_users(each) and not is_instrumented(each)}

        return stop

    def met_late(self, own: set[int]) -> tuple[FunctionType, ...] | None:
        """Return the functions to observe from the start of another attempt, or None if this one has seen all.

        They come from places that were not searched, such as a table of hooks, or ran while a module was imported.

        Args:
            own: ids of the code that is not the program's: that of the tracer and of finders of modules.
        """
        ran = [each for each in self._ran.values() if id(each) not in own and _elsewhere.get(id(each)) is not each]
        files = {getattr(sys.modules[name], "__file__", None) for name in sys.modules.keys() - self._imported}
        codes = [each for each in ran if each.co_filename not in files]
        functions = [each for each in gc.get_referrers(*codes) if type(each) is FunctionType] if codes else []
        found = [each for each in functions if not source.is_generated_elsewhere(each.__code__, each.__globals__)]
        users = {id(each.__code__) for each in found}
        _elsewhere.update({id(each.__code__): each.__code__ for each in functions if id(each.__code__) not in users})
        return (*self._also, *found) if found or len(codes) < len(ran) else None

    def note_cache(self, value: Any) -> None:
        """Note a function that caches its results; the results of a capture are dropped afterwards."""
        kind: type = type(value)
        if kind is LRU_CACHE:
            self.caches.setdefault(id(value), (value, value.cache_info().misses, tuple(entries_of(value))))

    def discover_class(self, kind: type) -> None:
        """Observe the functions that a class and its bases define and that run without being looked up by name.

        Functions that instrumented code looks up are observed at that time. In another attempt, all are observed from
        the start.
        """
        if kind in self._classes:
            return
        self._classes.add(kind)
        for base in kind.__mro__:
            if base.__flags__ & HEAP_TYPE and not is_fx(base.__module__):
                whole = bool(self._also) or base.__module__.startswith("torch.nn.modules.")
                for name, value in list(base.__dict__.items()):
                    self.note_cache(value)
                    if whole or name.startswith("__") or name == "forward":
                        for function in functions_in(value):
                            self.discover_function(function)

    def discover_function(self, function: FunctionType) -> None:
        """Observe a function if it is the user's or that of one of torch's own modules."""
        code = function.__code__
        if function in self.swapped or is_instrumented(code):
            return
        if not is_observed(code) or source.is_generated_elsewhere(code, function.__globals__):
            return
        made, names = _instrumented(code)
        self.swapped[function] = code
        function.__code__ = _with_entry(made, _entry(function, names))


def _instrumented(code: CodeType) -> tuple[CodeType, tuple[str, ...]]:
    """Return the code with all observers except that of its beginning, and the global names that it reads."""
    key = id(code)
    if key not in _made:
        weakref.finalize(code, _made.pop, key, None).atexit = False
        _made[key] = instrumented(code, _OBSERVERS, _nested), globals_of(code)
    return _made[key]


def _nested(code: CodeType) -> CodeType:
    made, names = _instrumented(code)
    return _with_entry(made, _entry(None, names))


_made: dict[int, tuple[CodeType, tuple[str, ...]]] = {}
"""The instrumented code made from code, by id: captures of one class follow one another, and all need torch's."""
_elsewhere: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()
"""Code that has run in captures, from functions that were generated for classes that are not the user's, by id."""


def is_observed(code: CodeType | None) -> bool:
    """Return whether functions with this code are observed: the user's, and those of torch's own modules."""
    return code is not None and _observed(code.co_filename, code.co_name)


@functools.cache
def _observed(file: str, name: str) -> bool:
    if file.startswith(_MODULES):
        return name not in _PLUMBING
    if file.startswith(_SETTINGS):
        return True
    if file.startswith(source.LIBRARIES) or source.GENERATED in file:
        return False
    library = file.rpartition("-packages/")[2].partition("/")[0].removesuffix(".py")
    return library not in _TORCHS_LIBRARIES and (not file.startswith(source.STANDARD) or "-packages/" in file)


def _is_users(code: CodeType) -> bool:
    """Return whether code is a function's, and neither torch's nor run by the import of a module."""
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    return is_function and is_observed(code) and not code.co_filename.startswith((*_MODULES, _SETTINGS))


def code_of(function: Any) -> CodeType | None:
    """Return the code of a Python function, and None for anything else, without reading any of its attributes."""
    return function.__code__ if type(function) is FunctionType else None


def _with_entry(code: CodeType, entry: Observer) -> CodeType:
    return code.replace(co_consts=tuple(entry if each is ENTRY else each for each in code.co_consts))


def is_instrumented(code: CodeType) -> bool:
    """Return whether code calls observers."""
    return any(type(each) is FunctionType and each.__module__ == __name__ for each in code.co_consts)


def is_a(value: object, kinds: Any) -> bool:
    """Return whether a value is an instance of the classes; `isinstance` would call the value's `__getattribute__`."""
    return issubclass(type(value), kinds)


def entries_of(cache: Any) -> dict[Any, Any]:
    """Return the dict in which a cache keeps its results, which only the garbage collector can see."""
    return next(each for each in gc.get_referents(cache) if type(each) is dict and each is not cache.__dict__)


def all_functions(kind: type) -> Iterator[FunctionType]:
    """Yield the functions that a class defines."""
    for value in list(kind.__dict__.values()):
        yield from functions_in(value)


def functions_in(value: Any, depth: int = 0) -> Iterator[FunctionType]:
    """Yield the Python functions that a value is or calls: those of a method, a property or a decorated function."""
    kind = type(value)
    if kind is FunctionType:
        yield value
        if not is_observed(value.__code__) and depth < 3:
            for cell in value.__closure__ or ():
                try:
                    inner = cell.cell_contents
                except ValueError:
                    continue
                if type(inner) in (FunctionType, MethodType, LRU_CACHE, functools.partial):
                    yield from functions_in(inner, depth + 1)
    elif kind in (staticmethod, classmethod, MethodType):
        yield from functions_in(value.__func__, depth)
    elif kind is functools.partial or kind is functools.partialmethod:
        yield from functions_in(value.func, depth)
    elif is_a(value, property):
        for each in (value.fget, value.fset, value.fdel):
            yield from functions_in(each, depth)
    elif kind is functools.cached_property:
        yield from functions_in(value.func, depth)
    elif kind is LRU_CACHE:
        yield from functions_in(value.__wrapped__, depth)


def is_fx(module: str) -> bool:
    """Return whether a module of this name belongs to the capturing code."""
    return module.startswith(("torch.fx", "fxlib."))
