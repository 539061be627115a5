"""Convert code objects to lists of instructions and back, keeping jumps, exception handlers and positions.

This is the only module that depends on the layout of Python's code. Versions 3.11 to 3.13 are supported: they agree on
the tables, and differ in their instructions, in the number of cache entries after each, and in the position of a call's
NULL.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeAlias

VERSION = sys.version_info[:2]
IS_KNOWN = VERSION in ((3, 11), (3, 12), (3, 13))
"""Whether the bytecode of this version of Python is known."""
NULL_IS_ABOVE = VERSION >= (3, 13)
"""Whether the NULL of a call lies above the called object on the stack; before 3.13, it lies below."""
_EXTENDED = dis.opmap["EXTENDED_ARG"]
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS"})
_JUMPS = frozenset(dis.opname[each] for each in (*dis.hasjrel, *dis.hasjabs))


def _caches() -> dict[str, int]:
    known: Any = dis._inline_cache_entries  # type: ignore[attr-defined]
    if isinstance(known, dict):
        return {name: known.get(name, 0) for name in dis.opmap}
    return {name: known[code] for name, code in dis.opmap.items() if code < len(known)}


_CACHES = _caches()
"""The number of cache entries that follow each instruction, by the instruction's name."""


Position: TypeAlias = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first column and the column behind the last; None for each that is unknown."""
_NOWHERE: Position = (None, None, None, None)


class Instruction:
    """One instruction.

    Attributes:
        name: the name of the operation.
        argument: the argument, or 0 if there is none; `assembled` computes that of a jump.
        position: the position in the source.
        target: the instruction to which it jumps, if it is a jump.
        offset: the offset from the beginning of the code, in units of two bytes.
        size: the size in these units, with argument prefixes and caches.
    """

    __slots__ = ("argument", "name", "offset", "position", "size", "target")

    def __init__(self, name: str, argument: int = 0, position: Position = _NOWHERE) -> None:
        self.name, self.argument, self.position = name, argument, position
        self.target: Instruction | None = None
        self.offset = 0
        self.size = 1 + _CACHES[name] + (argument > 255 and (argument.bit_length() - 1) // 8)

    @property
    def ends(self) -> bool:
        """Whether the next instruction does not run after this one."""
        return self.name in _ENDS or self.name.startswith(("JUMP_FORWARD", "JUMP_BACKWARD"))


@dataclass(frozen=True, slots=True)
class Handled:
    """A range of instructions whose exceptions go to a handler; `stop` is the first after it, or None at the end."""

    start: Instruction
    stop: Instruction | None
    target: Instruction
    depth: int
    lasti: bool


def read(code: CodeType) -> tuple[list[Instruction], list[Handled]]:
    """Return the instructions of a code object, and the ranges whose exceptions are handled."""
    units, positions = code.co_code, list(code.co_positions())
    made: list[Instruction] = []
    at: dict[int, Instruction] = {}
    jumps: list[tuple[Instruction, int]] = []
    place, prefix, waiting = 0, 0, list[int]()
    while place < len(units) // 2:
        waiting.append(place)
        name, argument = dis.opname[units[2 * place]], units[2 * place + 1] | prefix
        place += 1 + _CACHES[name]
        if name == "EXTENDED_ARG":
            prefix = argument << 8
            continue
        each = Instruction(name, argument, positions[waiting[-1]])
        made.append(each)
        at.update(dict.fromkeys(waiting, each))  # a jump may target the prefixes
        prefix, waiting = 0, []
        if name in _JUMPS:
            jumps.append((each, place - argument if "BACKWARD" in name else place + argument))
    for jump, target in jumps:
        jump.target = at[target]
    handled = [
        Handled(at[entry.start // 2], at.get(entry.end // 2), at[entry.target // 2], entry.depth, entry.lasti)
        for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
    ]
    return made, handled


def assembled(
    code: CodeType,
    instructions: Sequence[Instruction],
    handled: Iterable[Handled],
    first: Mapping[Instruction, Instruction],
    *,
    constants: tuple[Any, ...],
    stack: int,
) -> CodeType:
    """Return a copy of a code object with other instructions.

    Args:
        code: the code object.
        instructions: the instructions of the copy.
        handled: the ranges of the original instructions whose exceptions are handled.
        first: for each original instruction, the first one that replaces it.
        constants: the constants of the copy.
        stack: the maximum number of values on the stack.
    """
    _lay_out(instructions)
    return code.replace(
        co_code=_encoded(instructions),
        co_consts=constants,
        co_stacksize=stack,
        co_linetable=_location_table(instructions, code.co_firstlineno),
        co_exceptiontable=_exception_table(handled, first, instructions),
    )


def _lay_out(instructions: Iterable[Instruction]) -> None:
    """Set the offsets of instructions and the distances of jumps, and repeat until neither changes the other."""
    jumps = [each for each in instructions if each.target is not None]
    moved = True
    while moved:
        moved, offset = False, 0
        for each in instructions:
            each.offset = offset
            offset += each.size
        for each in jumps:
            each.argument = abs(each.target.offset - each.offset - each.size)  # type: ignore[union-attr]
            size = 1 + _CACHES[each.name] + (each.argument > 255 and (each.argument.bit_length() - 1) // 8)
            if size > each.size:  # sizes never shrink, so that the layout becomes stable
                moved, each.size = True, size


def _encoded(instructions: Iterable[Instruction]) -> bytes:
    made = bytearray()
    for each in instructions:
        argument, caches = each.argument, _CACHES[each.name]
        for shift in range(8 * (each.size - 1 - caches), 0, -8):
            made += bytes((_EXTENDED, argument >> shift & 255))
        made += bytes((dis.opmap[each.name], argument & 255)) + b"\0\0" * caches
    return bytes(made)


def _exception_table(
    handled: Iterable[Handled], first: Mapping[Instruction, Instruction], instructions: Sequence[Instruction]
) -> bytes:
    end = instructions[-1].offset + instructions[-1].size
    table = bytearray()
    for each in handled:
        start = first[each.start].offset
        stop = end if each.stop is None else first[each.stop].offset
        numbers = (start, stop - start, first[each.target].offset, each.depth << 1 | each.lasti)
        for index, number in enumerate(numbers):
            table += _varint(number, 0x80 if index == 0 else 0)
    return bytes(table)


def _varint(value: int, begin: int) -> bytes:
    digits = [value & 63]
    while value := value >> 6:
        digits.append(value & 63)
    digits.reverse()
    made = [digit | 64 for digit in digits[:-1]] + digits[-1:]
    made[0] |= begin
    return bytes(made)


def _location_table(instructions: Iterable[Instruction], first_line: int) -> bytes:
    """Encode positions: by code 14 of the format, by 13 where columns are unknown, or by 15 where there is no line."""
    table, line = bytearray(), first_line
    for each in instructions:
        first, last, begin, end = each.position
        units = each.size
        while units:
            length = min(units, 8)
            units -= length
            known = first is not None and last is not None and begin is not None and end is not None
            table.append(0x80 | (15 if first is None else 14 if known else 13) << 3 | length - 1)
            if first is None:
                continue
            change, line = first - line, first
            table += _location((-change << 1 | 1) if change < 0 else change << 1)
            if last is not None and begin is not None and end is not None:
                table += _location(last - first) + _location(begin + 1) + _location(end + 1)
    return bytes(table)


def _location(value: int) -> bytes:
    made = bytearray()
    while value > 63:
        made.append(value & 63 | 64)
        value >>= 6
    made.append(value)
    return bytes(made)
