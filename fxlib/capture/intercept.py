"""Interception of calls during a capture, under every alias of a function, and only in the capturing thread.

A function such as `rpc_sync` may have been imported under any name, held by a closure, a default argument or a
`functools.partial`. Patching names would miss some of these aliases, so the function object itself is given other code
during the capture, and all of its aliases follow, wherever they are. The new code checks whether this thread is
capturing; if it is not, the original runs.
"""

from __future__ import annotations

import dis
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any, Self, cast

Call = Callable[..., Any]
Replace = Callable[[Call], Call]
"""A function that takes the original and returns its replacement."""

one_at_a_time = threading.Lock()
"""Whoever replaces functions holds this meanwhile."""
_SLOT = "the redirection stands here"
_thread = threading.local()


class Interception:
    """The replacements of one capture, seen by the thread that entered it. Only one capture at a time may have any."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        _thread.capturing = True
        self._undo.callback(_thread.__dict__.pop, "capturing", None)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def function(self, function: Call, replace: Replace) -> None:
        """Replace a Python function, whatever alias it is called by."""
        if not isinstance(function, FunctionType):
            raise TypeError(f"{function!r} is no Python function")
        code = function.__code__
        original = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        original.__defaults__, original.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        replacement: Call | None = replace(original)

        def redirection(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return (original if replacement is None or not is_capturing() else replacement)(*args, **kwargs)

        def forget() -> None:  # whoever keeps the code, as a profiler does, is not to keep what the capture has made
            nonlocal replacement
            replacement = None

        self._undo.callback(forget)
        self._undo.callback(setattr, function, "__code__", code)
        function.__code__ = _code_that_calls(redirection, code)

    def method(self, owner: type | ModuleType, name: str, replace: Replace) -> None:
        """Replace a method, or a module's function, that a C or C++ extension defines; the method may be inherited."""
        inherited = name not in owner.__dict__
        original = getattr(owner, name) if inherited else owner.__dict__[name]
        replacement = replace(original)

        def redirected(*args: Any, **kwargs: Any) -> Any:
            return (replacement if is_capturing() else original)(*args, **kwargs)

        undo = (delattr, owner, name) if inherited else (setattr, owner, name, original)
        self._undo.callback(*undo)
        setattr(owner, name, redirected)


def is_capturing() -> bool:
    """Return whether calls of this thread are being captured right now."""
    return getattr(_thread, "capturing", False)


@contextmanager
def suspended() -> Iterator[None]:
    """Let calls of this thread reach the originals during the block."""
    before, _thread.capturing = is_capturing(), False
    try:
        yield
    finally:
        _thread.capturing = before


def _open_template(*args: Any, **kwargs: Any) -> Any:
    redirection: Any = "the redirection stands here"
    return redirection(args, kwargs)


def _closed_template(variable: object) -> FunctionType:
    def template(*args: Any, **kwargs: Any) -> Any:
        redirection: Any = "the redirection stands here"
        return redirection(args, kwargs) if variable is variable else None  # noqa: PLR0124 - makes it a free variable

    return cast(FunctionType, template)


def _code_that_calls(redirection: Call, code: CodeType) -> CodeType:
    """Return code that passes its arguments on; it has as many free variables as `code`, because the closure is kept.

    The redirection is a constant of the code, so a call that began before the end of the capture still finds it.
    """
    template = _closed_template(None).__code__ if code.co_freevars else _open_template.__code__
    constants = tuple(redirection if value == _SLOT else value for value in template.co_consts)
    if not code.co_freevars:
        return template.replace(co_consts=constants, co_name=code.co_name)
    # The first instruction copies the closure's cells into the frame; its argument is their number.
    if template.co_code[0] != dis.opmap["COPY_FREE_VARS"]:
        raise RuntimeError(f"fxlib does not know the code of Python {sys.version}")
    copying = bytes([template.co_code[0], len(code.co_freevars)]) + template.co_code[2:]
    return template.replace(co_consts=constants, co_name=code.co_name, co_freevars=code.co_freevars, co_code=copying)


def leave_logging_alone(interception: Interception) -> None:
    """Let factories and handlers of log records run unobserved, including those of libraries such as Ray.

    torch logs during an export; whether the forward itself logs is seen where it calls the logger.
    """
    for function in (logging.Logger.makeRecord, logging.Logger.handle):
        interception.function(function, _unobserved)


def _unobserved(original: Call) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            return original(*args, **kwargs)

    return call
