"""Is a remote call guarded by an `except` of the user's? The handler would be lost: a graph has no way to catch."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType

from fxlib.capture import source

_ENDS = ("RERAISE", "POP_EXCEPT")


def guarding_handler(frame: FrameType | None, end: FrameType | None) -> str:
    """Return file:line of the user's innermost statement under a `try` with `except` that is running, or ""."""
    while frame is not None and frame is not end:
        code = frame.f_code
        if source.is_users(code) and any(start <= frame.f_lasti < stop for start, stop in _guarded(code)):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=1024)
def _guarded(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Ranges of the code under a `try` that has an `except`; `with` and `finally` only pass exceptions on."""
    instructions = list(dis.get_instructions(code))
    place = {instruction.offset: index for index, instruction in enumerate(instructions)}
    # `dis` shows the table, and has no public way to read it.
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return tuple(
        (entry.start, entry.end)
        for entry in table
        if _catches([each.opname for each in instructions[place[entry.target] :]])
    )


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
