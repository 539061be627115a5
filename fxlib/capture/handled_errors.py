"""Errors of captures, and the program's own error handlers around what it computes: a graph cannot catch errors.

An error that ends a capture ends it even if the captured program catches the error.
"""

from __future__ import annotations

import dis
import functools
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from fxlib.capture import source
from fxlib.errors import CaptureError

_thread = threading.local()
NOT_OF_TENSORS = frozenset(
    {"AttributeError", "KeyError", "ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError"}
    | {"StopIteration", "OSError", "FileNotFoundError", "UnicodeError"}
)
"""Names of the exceptions that no operation on tensors raises."""
OF_TYPES = NOT_OF_TENSORS | {"TypeError", "NotImplementedError"}
"""Names of the exceptions that no operation on tensors raises if the tensors' classes, dtypes and sizes are known."""
_ENDS = ("RERAISE", "POP_EXCEPT")


def capture_error(problem: str, *, hint: str, where: str = "") -> CaptureError:
    """Return the error to raise; by default, `where` is the user's statement that is running.

    The error is also recorded, because the user's own `except` may catch it; the forward would then continue on a path
    that it never takes in a run.
    """
    error = CaptureError(problem, where=where or source.here(), hint=hint)
    getattr(_thread, "errors", []).append(error)
    return error


@contextmanager
def unswallowed() -> Iterator[None]:
    """Raise the first error that `capture_error` made in the block, even if the block caught it.

    Raises:
        CaptureError: the block made such an error.
    """
    errors: list[CaptureError] = []
    _thread.errors = errors
    try:
        yield
    except Exception as error:
        if errors and error is not errors[0]:
            raise errors[0] from error
        raise
    finally:
        del _thread.errors
    if errors:
        raise errors[0]


def refuse_guarded(frame: FrameType | None, end: FrameType | None, *, never_raised: Collection[str]) -> None:
    """Refuse work whose errors the program handles: a graph cannot catch what only a run raises."""
    if place := guarding_handler(frame, end, never_raised=never_raised):
        raise capture_error(
            "an except guards what is computed here, and a graph cannot catch what only a run raises",
            where=place,
            hint="Check before what may fail, or catch it outside of the forward.",
        )


def guarding_handler(
    frame: FrameType | None, end: FrameType | None, *, never_raised: Collection[str] = frozenset()
) -> str:
    """Return file:line of the user's innermost running statement in a `try` with an `except`, or "" if there is none.

    Args:
        frame: the innermost frame.
        end: the frame at which the user's frames end.
        never_raised: names of exceptions; a handler of these alone does not count.
    """
    while frame is not None and frame is not end:
        code = frame.f_code
        if source.is_users(code) and handles(code, frame.f_lasti, frame.f_globals, never_raised=never_raised):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def handles(code: CodeType, place: int, scope: Collection[str], *, never_raised: Collection[str]) -> bool:
    """Return whether an `except` guards the instruction at an offset; names in `scope` are not builtin exceptions."""
    return any(
        start <= place < stop and not (names and names.issubset(never_raised) and names.isdisjoint(scope))
        for start, stop, names in _guarded(code)
    )


@functools.lru_cache(maxsize=1024)
def _guarded(code: CodeType) -> tuple[tuple[int, int, frozenset[str]], ...]:
    """Return the ranges of the code that a `try` with an `except` guards; `with` and `finally` only pass exceptions on.

    Each range comes with the names of the classes that its handler catches, if operations on tensors raise none of
    them.
    """
    instructions = list(dis.get_instructions(code))
    place = {instruction.offset: index for index, instruction in enumerate(instructions)}
    # `dis` prints the table, but has no public function that reads it.
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return tuple(
        (entry.start, entry.end, _caught(instructions[place[entry.target] :]))
        for entry in table
        if _catches([each.opname for each in instructions[place[entry.target] :]])
    )


def _caught(handler: list[dis.Instruction]) -> frozenset[str]:
    """Return the names of the classes that a handler catches, if operations on tensors surely raise none of them."""
    found: set[str] = set()
    waiting: set[str] = set()
    for each in handler:
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            waiting.add(each.argval)
        elif each.opname == "CHECK_EXC_MATCH":
            if not waiting or not waiting <= OF_TYPES:
                return frozenset()
            found, waiting = found | waiting, set()
        elif each.opname in ("LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "CHECK_EG_MATCH"):
            waiting.add(each.opname)
        elif each.opname == "POP_EXCEPT":
            waiting = set()
        elif each.opname == "RERAISE" and found:
            break
    return frozenset(found)


def _catches(handler: list[str]) -> bool:
    if handler[:1] != ["PUSH_EXC_INFO"]:
        return False
    if handler[1] == "POP_TOP":  # `except:`
        return True
    for name in handler[1:]:
        if name in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH"):
            return True
        if name in _ENDS or name == "WITH_EXCEPT_START":
            return False
    return False
