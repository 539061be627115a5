"""Errors of captures, and the program's own error handlers around what it computes: a graph cannot catch errors.

An error that ends a capture ends it even if the captured program catches the error.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
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
_OTHER_LOADS = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "CHECK_EG_MATCH"})
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


def refuse_guarded(
    frame: FrameType | None, end: FrameType | None, *, never_raised: Collection[str], torchs: bool = False
) -> None:
    """Refuse work whose errors the program handles: a graph cannot catch what only a run raises.

    `torchs` says that the work is torch's own, which raises no exceptions of the program's classes.
    """
    if place := guarding_handler(frame, end, never_raised=never_raised, torchs=torchs):
        raise capture_error(
            "an except guards what is computed here, and a graph cannot catch what only a run raises",
            where=place,
            hint="Check before what may fail, or catch it outside of the forward.",
        )


def guarding_handler(
    frame: FrameType | None,
    end: FrameType | None,
    *,
    never_raised: Collection[str] = frozenset(),
    torchs: bool = False,
) -> str:
    """Return file:line of the user's innermost running statement in a `try` with an `except`, or "" if there is none.

    Args:
        frame: the innermost frame.
        end: the frame at which the user's frames end.
        never_raised: names of exceptions; a handler of these alone does not count.
        torchs: whether a handler of the program's own exceptions does not count, either.
    """
    while frame is not None and frame is not end:
        code = frame.f_code
        if source.is_users(frame) and handles(
            code, frame.f_lasti, frame.f_globals, never_raised=never_raised, torchs=torchs
        ):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def clean_up(frame: FrameType | None, end: FrameType | None) -> str:
    """Return file:line of the user's innermost `finally` or `__exit__` that runs, or "" if none does.

    Args:
        frame: the innermost frame.
        end: the frame at which the user's frames end.
    """
    while frame is not None and frame is not end:
        code = frame.f_code
        if source.is_users(frame) and (code.co_name == "__exit__" or _cleans_up(code, frame.f_lasti)):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _cleans_up(code: CodeType, place: int) -> bool:
    """Return whether the instruction at an offset is one of a `finally`, or leaves a `with`.

    The compiler writes these twice, with the same positions: for an error, in a handler, and behind the block. Before
    Python 3.13, what enters the second manager of a `with` has them, too.
    """
    handlers = _passing_on(code)
    return bool(handlers and dis.opname[code.co_code[place]] != "BEFORE_WITH") and any(
        place > start and list(code.co_positions())[place // 2] in positions for start, positions in handlers
    )


@functools.lru_cache(maxsize=1024)
def _passing_on(code: CodeType) -> tuple[tuple[int, frozenset[tuple[int | None, ...]]], ...]:
    """Return the handlers that pass errors on: where the block begins, and the positions of the handler's calls."""
    instructions = list(dis.get_instructions(code))
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    ends = {entry.start: entry.end for entry in table}
    begins: dict[int, int] = {}
    for entry in table:
        begins[entry.target] = min(entry.start, begins.get(entry.target, entry.start))
    found = []
    for target, start in begins.items():
        handler = [each for each in instructions if target <= each.offset < ends.get(target, target)]
        names = [each.opname for each in handler]
        if names[:1] == ["PUSH_EXC_INFO"] and not _catches(names):
            calls = [each for each in handler if "CALL" in each.opname or each.opname == "WITH_EXCEPT_START"]
            found.append((start, frozenset(tuple(each.positions) for each in calls if each.positions is not None)))
    return tuple(found)


def handles(
    code: CodeType, place: int, scope: Mapping[str, object], *, never_raised: Collection[str], torchs: bool = False
) -> bool:
    """Return whether an `except` guards the instruction at an offset; `scope` are the global variables."""

    def never(name: str) -> bool:
        return torchs and _is_own(scope[name]) if name in scope else name in never_raised

    return any(
        start <= place < stop and not (names and all(map(never, names))) for start, stop, names in _guarded(code)
    )


def _is_own(kind: object) -> bool:
    """Return whether a value is a class of exceptions that neither Python nor torch has, and so never raises."""
    package = getattr(kind, "__module__", "").partition(".")[0]
    known = package in ("torch", "numpy", "fxlib") or package in sys.stdlib_module_names
    return isinstance(kind, type) and issubclass(kind, BaseException) and not known


@functools.lru_cache(maxsize=1024)
def _guarded(code: CodeType) -> tuple[tuple[int, int, frozenset[str]], ...]:
    """Return the ranges of the code that a `try` with an `except` guards; `with` and `finally` only pass exceptions on.

    Each range comes with the names of the classes that its handler catches, if all are named by global variables.
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
    """Return the names of the classes that a handler catches; none if it gets a class in another way."""
    found: set[str] = set()
    waiting: set[str] = set()
    for each in handler:
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            waiting.add(each.argval)
        elif each.opname == "CHECK_EXC_MATCH":
            if not waiting or not waiting.isdisjoint(_OTHER_LOADS):
                return frozenset()
            found, waiting = found | waiting, set()
        elif each.opname in _OTHER_LOADS:
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
