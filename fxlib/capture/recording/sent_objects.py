"""Objects that the forward sends: a graph keeps them as they are when the capture ends, so none may change before.

A call sends the present contents of an object. A graph has the object itself, and would send its final contents at each
call. Therefore, the contents are written down at each call and compared with those at the end of the forward.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

from torch.distributed import rpc

from fxlib.capture import source
from fxlib.capture.handled_errors import capture_error
from fxlib.capture.recording.observations import MACHINERY
from fxlib.capture.recording.observers import HEAP_TYPE, is_a
from fxlib.capture.recording.parts import behind, slots_of
from fxlib.capture.recording.record import STATELESS, VALUES
from fxlib.errors import CaptureError
from fxlib.runtime.guards.capture_facts import attributes_of, computed, contents_of, is_array, same
from fxlib.runtime.guards.dict_entries import Mark

_ITERATED = (list, tuple, set, frozenset, deque)
_IMMUTABLE = (int, float, complex, str, bytes)
_ITSELF = (*VALUES, type, ModuleType, FunctionType, BuiltinFunctionType, rpc.PyRRef, rpc.WorkerInfo, Mark)
"""Classes of the objects that are sent as themselves: by name, or by a node that has effects of its own."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_OF_EVERY_CLASS = frozenset({"__dict__", "__weakref__"})


class _Sent(NamedTuple):
    """An object that was sent."""

    value: Any
    held: list[Any]
    """The object's contents, as `_content_of` writes them down."""
    where: str
    """The file:line of the statement that sent it, or of the definition of the forward that got it as an argument."""
    given: bool = False
    """Whether it is an argument of the forward."""


class SentObjects:
    """The objects that one forward has sent.

    Args:
        knows: a function that tells whether an object existed before the forward began.
    """

    def __init__(self, knows: Callable[[Any], bool]) -> None:
        self._knows = knows
        self._sent: list[_Sent] = []
        self.kept: list[Any] = []
        """Objects that the forward has made and given to clients, which may write to them."""

    def note(self, value: Any, *, by_client: bool) -> None:
        """Note the contents of an object that becomes part of the graph.

        Raises:
            CaptureError: the object's contents cannot be known, and the forward has made it.
        """
        made = not self._knows(value)
        self._sent.append(_Sent(value, _content_of(value, self._unknown if made else None), source.here()))
        if made and by_client:
            self.kept.append(value)

    def note_argument(self, value: Any, where: str) -> None:
        """Note the contents of an argument of the forward; the graph of an export does not change them."""
        self._sent.append(_Sent(value, _content_of(value, None), where, given=True))

    def _unknown(self, value: Any) -> None:
        """Refuse an object whose contents cannot be known, unless it existed before."""
        if not self._knows(value) and not is_a(value, _LOCKS):
            raise capture_error(
                f"the forward makes and sends a {type(value).__name__}, and a graph would send the same one each time",
                hint="Make it before, or send what it is made of.",
            )

    def changed(self) -> CaptureError | None:
        """Return the error for an object that has changed since it was sent, or None if none has."""
        now: dict[int, list[Any]] = {}
        for sent in self._sent:
            if id(sent.value) not in now:
                now[id(sent.value)] = _content_of(sent.value, None)
            held = now[id(sent.value)]
            if len(held) == len(sent.held) and all(map(same, held, sent.held)):
                continue
            if sent.given:
                return CaptureError(
                    f"the forward changes a {type(sent.value).__name__} that it is given, which export would lose",
                    where=sent.where,
                    hint="Return the new values instead.",
                )
            return CaptureError(
                f"the forward changes a {type(sent.value).__name__} after it was handed on here, and a graph "
                "would have what it holds last",
                where=sent.where,
                hint="Hand on a copy of it: copy.deepcopy(value), or array.copy().",
            )
        return None

    def forget(self) -> None:
        """Drop all objects."""
        self._sent.clear()
        self.kept.clear()


def _content_of(value: Any, unknown: Callable[[Any], None] | None) -> list[Any]:
    """Write down all that a value leads to, so that `same` compares it part by part.

    Args:
        value: the object to walk through.
        unknown: a function that is called with each part of which nothing is known but its existence.
    """
    found: list[Any] = []
    numbers: dict[int, int] = {}
    todo, walked = [value], []
    while todo:
        each = todo.pop()
        kind = type(each)
        library = kind.__module__.partition(".")[0]
        if kind in STATELESS or issubclass(kind, _ITSELF) or (library in MACHINERY and each is not value):
            found.append(each)
        elif id(each) in numbers:
            found.append(("again", numbers[id(each)]))
        else:
            numbers[id(each)] = len(numbers)
            walked.append(each)  # an object made for the walk has to live as long as its id is used
            parts = _parts_of(each)
            if parts is None:
                if unknown is not None:
                    unknown(each)
                found.append(each)
                continue
            found.append(kind)
            todo.extend(reversed(parts))
    return found


def _parts_of(value: Any) -> list[Any] | None:
    """Return the contents of an object, or None if they cannot be known."""
    kind, parts = type(value), _parts_inside(value)
    if parts is None or not kind.__dictoffset__:
        return parts if parts is None else parts + [computed(value, name) for name in slots_of(kind)]
    return [*parts, attributes_of(value), *(computed(value, name) for name in slots_of(kind))]


def _parts_inside(value: Any) -> list[Any] | None:
    """Return the contents of an object besides its attributes, or None if they cannot be known."""
    if is_a(value, dict):
        items = (OrderedDict if is_a(value, OrderedDict) else dict).items(value)
        made = [value.default_factory] if is_a(value, defaultdict) else []
        return [len(items), *made, *(part for item in items for part in item)]
    if is_a(value, _ITERATED):
        base: Any = next(each for each in _ITERATED if is_a(value, each))
        return [len(value), *base.__iter__(value)]
    if is_array(value):
        held = value.ravel().tolist() if value.dtype.hasobject else [value.tobytes()]
        return [str(value.dtype.descr), tuple(value.shape), *held]
    if is_a(value, _IMMUTABLE):
        return [next(base for base in _IMMUTABLE if is_a(value, base)).__repr__(value)]
    if is_a(value, MethodType):
        return [value.__func__, value.__self__]
    if is_a(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if (held := contents_of(value)) is not None:
        return [held]
    return list(behind(value)) or _pickled(value)


def _pickled(value: Any) -> list[Any] | None:
    """Return what `pickle` would write for an object of a C class, or None if it cannot write the object."""
    if not any(map(_is_of_c, type(value).__mro__[:-1])):
        return []
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - whatever pickling raises, the contents are unknown
        return None
    return [*reduced] if is_a(reduced, tuple) else [reduced]


def _is_of_c(kind: type) -> bool:
    """Return whether a class is written in C, so that its objects may hold what no attribute shows."""
    if not kind.__flags__ & HEAP_TYPE:
        return True
    return any(
        isinstance(each, (BuiltinFunctionType, MethodDescriptorType))
        or (isinstance(each, GetSetDescriptorType) and name not in _OF_EVERY_CLASS)
        for name, each in kind.__dict__.items()
    )
