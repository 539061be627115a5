"""Guard what a forward must not change during a capture: the model's own state, and generators of Python and NumPy."""

from __future__ import annotations

import functools
import importlib
import operator
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import Proxy

from fxlib.capture import source
from fxlib.errors import CaptureError
from fxlib.runtime.submodules import local_modules

_CONTAINERS = (list, dict, set)
_ABSENT = object()
WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")
"""Attributes of recurrent modules of torch, which rebuild them from whatever their parameters are."""
Same = Callable[[Any, Any], bool]


def _definition(module: nn.Module, _: str) -> str:
    return source.of_definition(type(module).forward)


def equal_copies(new: Any, old: Any) -> bool:
    """Return whether two values are one object, or containers of the same objects: `torch.export` copies containers."""
    if new is old or type(new) is not type(old):
        return new is old
    if isinstance(new, dict):
        return new.keys() == old.keys() and all(equal_copies(new[key], old[key]) for key in new)
    if isinstance(new, (list, tuple, deque)):
        return len(new) == len(old) and all(map(equal_copies, new, old))
    return isinstance(new, set) and new == old


@contextmanager
def unchanged(
    model: object,
    added: Collection[str],
    *,
    same: Same = operator.is_,
    where: Callable[[nn.Module, str], str] = _definition,
) -> Iterator[None]:
    """Undo the block's changes to the model's modules: to their attributes, state, containers and random generators.

    Args:
        model: the model; a function has no state.
        added: attributes that the tracer adds to the model during the block.
        same: takes a new and an old value, and returns whether the replacement does not count as a change.
        where: takes a module and an attribute's name, and returns where the attribute was changed, for the error.

    Raises:
        CaptureError: the block changed something.
    """
    held = list(_held(model)) if isinstance(model, nn.Module) else []
    before = [_snapshot(value) for _, _, value in held]
    try:
        yield
    finally:
        changed = []
        for (module, name, _), copy in zip(held, before, strict=True):
            if not name:
                _forget_cached(module, copy)
        for (module, name, value), copy in zip(held, before, strict=True):
            ignored = [*(added if module is model else ()), *_own_lists(module)] if not name else ()
            if difference := _difference(value, copy, ignored, same):
                changed.append((module, name or difference))
            if difference or same is not operator.is_:
                _restore(value, copy, ignored)
    for module, name in changed:
        raise CaptureError(
            f"the forward changes {type(module).__name__}.{name}, so one step would depend on the last",
            where=where(module, name),
            hint="Return the value instead, or write to a buffer in place.",
        )


def _held(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the objects that may change: each module's table of attributes, and the containers and generators in it."""
    for _, module in local_modules(model):
        yield module, "", module.__dict__
        for name, value in module.__dict__.items():
            if name in _own_lists(module):
                continue
            if type(value) in _CONTAINERS or _generator_state(value) is not None:
                yield module, name, value


def _own_lists(module: nn.Module) -> Collection[str]:
    return WEIGHT_LISTS if isinstance(module, nn.RNNBase) else ()


def _forget_cached(module: nn.Module, known: Collection[str]) -> None:
    """Drop cached properties that were first computed meanwhile and hold no traced value: a run recomputes them."""
    for name in [each for each in module.__dict__ if each not in known]:
        computed = isinstance(getattr(type(module), name, None), functools.cached_property)
        if computed and not isinstance(module.__dict__[name], Proxy):
            del module.__dict__[name]


def _generator_state(value: Any) -> Any:
    """Return the state of a random generator of Python or NumPy, and None for any other value.

    It is not asked by `isinstance`, which would run another object's own `__getattribute__`.
    """
    if issubclass(type(value), random.Random):
        return value.getstate()
    bits = getattr(value, "bit_generator", None) if type(value).__module__.startswith("numpy.random") else None
    return None if bits is None else bits.state


def _snapshot(value: Any) -> Any:
    return value.copy() if isinstance(value, _CONTAINERS) else _generator_state(value)


def _difference(value: Any, copy: Any, ignored: Collection[str], same: Same) -> str:
    """Return a description of what differs, or an empty text if nothing does."""
    if isinstance(value, dict):
        names = [key for key in {**copy, **value} if key not in ignored]
        return next((str(key) for key in names if not same(value.get(key, _ABSENT), copy.get(key, _ABSENT))), "")
    if isinstance(value, list):
        alike = len(value) == len(copy) and all(map(same, value, copy))
    elif isinstance(value, set):
        alike = {id(each) for each in value} == {id(each) for each in copy}
    else:
        alike = repr(_generator_state(value)) == repr(copy)
    return "" if alike else "what it holds"


def _restore(value: Any, copy: Any, ignored: Collection[str]) -> None:
    if isinstance(value, random.Random):
        value.setstate(copy)
    elif not isinstance(value, _CONTAINERS):
        value.bit_generator.state = copy
    elif isinstance(value, list):
        value[:] = copy
    else:
        kept = {name: value[name] for name in ignored if name in value} if isinstance(value, dict) else {}
        value.clear()
        value.update(copy)
        value.update(kept) if isinstance(value, dict) else None


class DrawnError(CaptureError):
    """The error for a random generator that was drawn from while a forward was captured."""

    others: bool
    """Whether other threads were running, one of which may have drawn."""


@contextmanager
def generators_unused(forward: object) -> Iterator[None]:
    """Refuse a block that draws from Python's or NumPy's random generators: each run would see the same numbers.

    The generators are put back, unless other threads are running, which may have drawn numbers as well.

    Raises:
        DrawnError: a generator was drawn from.
    """
    before = [(name, read, put, read()) for name, read, put in _generators()]
    drawn, others = "", False
    try:
        yield
    finally:
        for name, read, put, state in before:
            if not _same(state, read()):
                drawn, others = name, threading.active_count() > 1
                if not others:
                    put(state)
    if drawn:
        error = DrawnError(
            f"{drawn} was drawn from while the forward was traced, and a graph would see the same numbers at every run",
            where=source.of_definition(forward),
            hint="Draw with torch (torch.rand), or before the forward. If another thread drew, capture before it runs.",
        )
        error.others = others
        raise error


def _generators() -> list[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    found: list[tuple[str, Callable[[], Any], Callable[[Any], None]]] = [
        ("Python's random generator", random.getstate, random.setstate)
    ]
    if "numpy" in sys.modules:
        numpy_random = importlib.import_module("numpy.random")  # NumPy imports it at its first use
        found.append(("NumPy's random generator", numpy_random.get_state, numpy_random.set_state))
    return found


def _same(state: Any, other: Any) -> bool:
    return all(map(_same_part, state, other))


def _same_part(part: Any, other: Any) -> bool:
    equal = part == other
    return equal if isinstance(equal, bool) else bool(equal.all())
