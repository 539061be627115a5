"""Is a remote call guarded by an `except` of the user's? The handler would be lost: a graph has no way to catch."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType

from fxlib.capture import source

_NOT_OF_TENSORS = frozenset(
    {"AttributeError", "KeyError", "ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError"}
    | {"StopIteration", "OSError", "FileNotFoundError", "UnicodeError"}
)
"""What no operation on tensors raises."""
_ENDS = ("RERAISE", "POP_EXCEPT")


def guarding_handler(frame: FrameType | None, end: FrameType | None, *, of_tensors: bool = False) -> str:
    """Return file:line of the user's innermost statement under a `try` with `except` that is running, or "".

    Args:
        frame: the innermost frame.
        end: the frame at which the user's end.
        of_tensors: count only handlers that may catch what an operation on tensors raises.
    """
    while frame is not None and frame is not end:
        code = frame.f_code
        if source.is_users(code) and any(
            start <= frame.f_lasti < stop and not (of_tensors and names and names.isdisjoint(frame.f_globals))
            for start, stop, names in _guarded(code)
        ):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=1024)
def _guarded(code: CodeType) -> tuple[tuple[int, int, frozenset[str]], ...]:
    """Ranges of the code under a `try` that has an `except`; `with` and `finally` only pass exceptions on.

    With each goes what it catches, if that is nothing that an operation on tensors raises.
    """
    instructions = list(dis.get_instructions(code))
    place = {instruction.offset: index for index, instruction in enumerate(instructions)}
    # `dis` shows the table, and has no public way to read it.
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return tuple(
        (entry.start, entry.end, _caught(instructions[place[entry.target] :]))
        for entry in table
        if _catches([each.opname for each in instructions[place[entry.target] :]])
    )


def _caught(handler: list[dis.Instruction]) -> frozenset[str]:
    """Return the names of the classes that a handler catches, if they are all known to be none of a tensor's errors."""
    found: set[str] = set()
    waiting: set[str] = set()
    for each in handler:
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            waiting.add(each.argval)
        elif each.opname == "CHECK_EXC_MATCH":
            if not waiting or not waiting <= _NOT_OF_TENSORS:
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
