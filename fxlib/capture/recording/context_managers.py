"""Tell which context managers may swallow or replace an error raised in their block, as a graph cannot."""

from __future__ import annotations

import contextlib
import dis
import functools
from types import CodeType, FunctionType, GeneratorType
from typing import Any

from fxlib.capture import source
from fxlib.capture.handled_errors import NOT_OF_TENSORS, handles
from fxlib.capture.recording.observers import functions_in, is_a, original_code

_ELSEWHERE = (
    *(ImportError, ModuleNotFoundError, OSError, FileNotFoundError, NameError, AttributeError, KeyError),
    *(StopIteration, UnboundLocalError, UnicodeError),
)
"""Exceptions that no node of a graph raises."""


def may_swallow(manager: Any) -> bool:
    """Return whether a context manager may swallow an error of its block, or raise another in its place."""
    if is_a(manager, contextlib.suppress):
        return not set(manager._exceptions) <= set(_ELSEWHERE)
    if is_a(manager, contextlib.ExitStack):
        return any(is_sync and exit_may_swallow(each) for is_sync, each in manager._exit_callbacks)
    generator: Any = getattr(manager, "gen", None)
    if is_a(generator, GeneratorType) and type(manager).__module__ == "contextlib":
        return _catches_at_yield(generator)
    return exit_may_swallow(getattr(type(manager), "__exit__", None))


def exit_may_swallow(exits: Any) -> bool:
    """Return whether an `__exit__` method, bound or not, or a function like it, may swallow or replace an error."""
    if (manager := getattr(exits, "__self__", None)) is not None and exits.__func__ is type(manager).__exit__:
        return may_swallow(manager)
    return any(
        source.is_users_code(each.__code__, each.__globals__) and _returns_true(original_code(each))
        for each in functions_in(exits)
    )


def decorates_with(function: Any) -> Any:
    """Return the context manager with which a function is decorated, given the function that `contextlib` made."""
    if type(function) is not FunctionType or function.__code__.co_name != "inner":
        return None
    if function.__code__.co_filename != contextlib.__file__:
        return None
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return held["self"].cell_contents if "self" in held else None


def _catches_at_yield(generator: GeneratorType[Any, Any, Any]) -> bool:
    code, frame = generator.gi_code, generator.gi_frame
    if frame is None or not source.is_users(frame):
        return False
    offsets = [each.offset for each in dis.get_instructions(code) if each.opname == "YIELD_VALUE"]
    return any(handles(code, each, frame.f_globals, never_raised=NOT_OF_TENSORS) for each in offsets)


@functools.lru_cache(maxsize=1024)
def _returns_true(code: CodeType) -> bool:
    """Return whether a function may return a true value; the result of another `__exit__` counts at its own entry."""
    before: dis.Instruction | None = None
    for each in dis.get_instructions(code):
        is_constant = before is not None and before.opname == "LOAD_CONST" and not each.is_jump_target
        if each.opname == "RETURN_CONST" and each.argval:
            return True
        if each.opname == "RETURN_VALUE" and not (is_constant and before is not None and not before.argval):
            return "__exit__" not in code.co_names
        before = each
    return False
