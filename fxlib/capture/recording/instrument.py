"""Code that tells what it reads: copies of code objects with observers before what reads or writes state.

An observer is a function that is called with what an instruction is about to work on, copied from the stack; the
program does not notice. That of a call returns what is to be called. Code objects inside of one are instrumented, too.

The layout of instructions, of the table of exception handlers and of that of lines is Python 3.11's.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

Observer = Callable[..., Any]

IS_KNOWN = sys.version_info[:2] == (3, 11)
"""Whether the code of this Python is known. Another's is left as it is: nothing is observed there."""
ENTRY = "where a function begins"
"""The constant for which the observer of entries stands: one for each function, as functions may share their code."""

_OPERANDS: Mapping[str, tuple[str, int]] = {
    "LOAD_ATTR": ("attribute", 1), "IMPORT_FROM": ("attribute", 1), "STORE_ATTR": ("stored", 1),
    "DELETE_ATTR": ("stored", 1), "BINARY_SUBSCR": ("item", 2), "STORE_SUBSCR": ("item_stored", 2),
    "DELETE_SUBSCR": ("item_stored", 2), "CONTAINS_OP": ("contained", 2), "IS_OP": ("identity", 2),
    "COMPARE_OP": ("operands", 2), "BINARY_OP": ("operands", 2), "UNARY_NOT": ("truth", 1),
    "UNARY_NEGATIVE": ("operands", 1), "UNARY_INVERT": ("operands", 1),
    "POP_JUMP_FORWARD_IF_FALSE": ("truth", 1), "POP_JUMP_FORWARD_IF_TRUE": ("truth", 1),
    "POP_JUMP_BACKWARD_IF_FALSE": ("truth", 1), "POP_JUMP_BACKWARD_IF_TRUE": ("truth", 1),
    "JUMP_IF_FALSE_OR_POP": ("truth", 1), "JUMP_IF_TRUE_OR_POP": ("truth", 1),
    "POP_JUMP_FORWARD_IF_NONE": ("none", 1), "POP_JUMP_FORWARD_IF_NOT_NONE": ("none", 1),
    "POP_JUMP_BACKWARD_IF_NONE": ("none", 1), "POP_JUMP_BACKWARD_IF_NOT_NONE": ("none", 1),
    "GET_ITER": ("contents", 1), "GET_YIELD_FROM_ITER": ("contents", 1), "UNPACK_SEQUENCE": ("contents", 1),
    "UNPACK_EX": ("contents", 1), "LIST_EXTEND": ("contents", 1), "SET_UPDATE": ("contents", 1),
    "DICT_UPDATE": ("contents", 1), "DICT_MERGE": ("contents", 1), "GET_LEN": ("contents", 1),
    "MATCH_MAPPING": ("contents", 1), "MATCH_SEQUENCE": ("contents", 1), "MATCH_KEYS": ("contents", 2),
    "MATCH_CLASS": ("matched", 3), "FORMAT_VALUE": ("formatted", 1), "BEFORE_WITH": ("entered", 1),
}  # fmt: skip
"""For each instruction: the observer, and how many operands it is shown, as they lie on the stack, the last on top."""
_NAMED = frozenset({"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "STORE_ATTR", "DELETE_ATTR"})
_WRITTEN_GLOBALS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_WRITTEN_CELLS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_READ_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", *_WRITTEN_GLOBALS})
_DEEPEST = 8
"""What a sequence around an observer needs of the stack, besides copies of operands."""


@dataclass(eq=False, slots=True)
class _Instruction:
    """One instruction; `target` is where it jumps, if it does."""

    name: str
    argument: int = 0
    line: int | None = None
    target: _Instruction | None = None
    offset: int = 0

    @property
    def size(self) -> int:
        prefixes = max(0, (self.argument.bit_length() - 1) // 8)
        return 2 * (1 + prefixes + dis._inline_cache_entries[dis.opmap[self.name]])  # type: ignore[attr-defined]

    def encoded(self) -> Iterator[int]:
        for shift in (24, 16, 8):
            if self.argument >> shift:
                yield from (dis.opmap["EXTENDED_ARG"], self.argument >> shift & 255)
        yield from (dis.opmap[self.name], self.argument & 255)
        yield from [0] * 2 * dis._inline_cache_entries[dis.opmap[self.name]]  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Handled:
    """A range of instructions whose exceptions go to a handler; `stop` is the first behind it, None at the end."""

    start: _Instruction
    stop: _Instruction | None
    target: _Instruction
    depth: int
    lasti: bool


def globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a code object reads or writes, without those of code inside of it."""
    return tuple(dict.fromkeys(each.argval for each in dis.get_instructions(code) if each.opname in _READ_GLOBALS))


def instrumented(code: CodeType, observers: Mapping[str, Observer], nested: Callable[[CodeType], CodeType]) -> CodeType:
    """Return a copy of `code` that calls the observers; what stands inside of it goes through `nested`."""
    instructions, handled = _read(code)
    constants = [nested(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    editor = _Editor(observers, constants, code)
    edited, first = editor.edit(instructions, _null_below(instructions, handled))
    deepest = max((each.argument for each in instructions if each.name == "CALL"), default=0)
    _lay_out(edited)
    return code.replace(
        co_code=bytes(byte for each in edited for byte in each.encoded()),
        co_consts=tuple(constants),
        co_stacksize=code.co_stacksize + deepest + _DEEPEST,
        co_linetable=_line_table(edited, code.co_firstlineno),
        co_exceptiontable=_exception_table(handled, first, edited),
    )


def _read(code: CodeType) -> tuple[list[_Instruction], list[_Handled]]:
    found: dict[int, _Instruction] = {}
    jumps: list[tuple[_Instruction, int]] = []
    waiting: list[int] = []
    for each in dis.get_instructions(code):
        waiting.append(each.offset)
        if each.opname == "EXTENDED_ARG":
            continue
        line = each.positions.lineno if each.positions is not None else None
        made = _Instruction(each.opname, each.arg or 0, line)
        found.update(dict.fromkeys(waiting, made))  # a jump may lead to the prefixes
        waiting = []
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            jumps.append((made, each.argval))
    for jump, offset in jumps:
        jump.target = found[offset]
    handled = [
        _Handled(found[entry.start], found.get(entry.end), found[entry.target], entry.depth, entry.lasti)
        for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
    ]
    return list(dict.fromkeys(found.values())), handled


def _null_below(instructions: list[_Instruction], handled: list[_Handled]) -> set[_Instruction]:
    """Return the calls under whose callable and arguments there is a NULL, and no method."""
    place = {each: index for index, each in enumerate(instructions)}
    todo: list[tuple[int, list[bool]]] = [(0, [])]
    todo += [(place[each.target], [False] * (each.depth + each.lasti + 1)) for each in handled]
    seen: set[int] = set()
    found: set[_Instruction] = set()
    while todo:
        index, stack = todo.pop()
        while index not in seen and index < len(instructions):
            seen.add(index)
            each = instructions[index]
            if each.name == "CALL" and stack[-each.argument - 2]:
                found.add(each)
            if each.target is not None:
                todo.append((place[each.target], _after(each, stack.copy(), jump=True)))
            stack = _after(each, stack, jump=False)
            if each.name in ("RETURN_VALUE", "RERAISE", "RAISE_VARARGS") or each.name.startswith(("JUMP_F", "JUMP_B")):
                break
            index += 1
    return found


def _after(each: _Instruction, stack: list[bool], *, jump: bool) -> list[bool]:
    """Return for each place of the stack, after an instruction, whether it holds a NULL."""
    argument, name = each.argument, each.name
    if name == "CALL":
        return [*stack[: -argument - 2], False]
    if name == "PRECALL":
        return stack
    if name == "LOAD_METHOD":
        return [*stack[:-1], True, False]
    if name == "SWAP":
        stack[-1], stack[-argument] = stack[-argument], stack[-1]
        return stack
    if name == "COPY":
        return [*stack, stack[-argument]]
    if name == "PUSH_NULL":
        return [*stack, True]
    if name == "LOAD_GLOBAL" and argument & 1:
        return [*stack, True, False]
    has_argument = dis.opmap[name] >= dis.HAVE_ARGUMENT
    effect = dis.stack_effect(dis.opmap[name], argument if has_argument else None, jump=jump)
    return stack[:effect] if effect < 0 else stack + [False] * effect


class _Editor:
    """Puts observers in place in one code object."""

    def __init__(self, observers: Mapping[str, Observer], constants: list[Any], code: CodeType) -> None:
        self._observers, self._constants, self._names = observers, constants, code.co_names
        self._variable: Callable[[int], str] = code._varname_from_oparg  # type: ignore[attr-defined]
        self._places: dict[int, int] = {}

    def edit(
        self, instructions: list[_Instruction], null_below: set[_Instruction]
    ) -> tuple[list[_Instruction], dict[_Instruction, _Instruction]]:
        """Return all instructions, and for each that was there the first of those in its place."""
        edited: list[_Instruction] = []
        first: dict[_Instruction, _Instruction] = {}
        begun = False
        for index, each in enumerate(instructions):
            begin = len(edited)
            edited += self._before(each, instructions[index:], null_below)
            edited += self._itself(each)
            first[each] = edited[begin]
            if each.name == "RESUME" and not begun:
                begun = True
                edited += self._observe(self._constant(ENTRY), 0, each.line)
        for each in edited:
            if each.target is not None:
                each.target = first[each.target]
        return edited, first

    def _before(
        self, each: _Instruction, rest: list[_Instruction], null_below: set[_Instruction]
    ) -> Iterator[_Instruction]:
        name, line = each.name, each.line
        if name == "LOAD_METHOD":
            yield from self._observe(self._observer("attribute"), 1, line, self._names[each.argument])
        elif name in _OPERANDS:
            observer, operands = _OPERANDS[name]
            if name == "FORMAT_VALUE" and each.argument & 4:
                operands = 2
            text = (self._names[each.argument],) if name in _NAMED else ()
            yield from self._observe(self._observer(observer), operands, line, *text)
        elif name in _WRITTEN_GLOBALS:
            yield from self._observe(self._observer("global_stored"), 0, line, self._names[each.argument])
        elif name in _WRITTEN_CELLS:
            yield _Instruction("PUSH_NULL", 0, line)
            yield _Instruction("LOAD_CONST", self._observer("cell_stored"), line)
            yield _Instruction("LOAD_CONST", self._constant(self._variable(each.argument)), line)
            yield _Instruction("LOAD_CLOSURE", each.argument, line)
            yield _Instruction("PRECALL", 2, line)
            yield _Instruction("CALL", 2, line)
            yield _Instruction("POP_TOP", 0, line)
        elif name == "KW_NAMES" or (name == "PRECALL" and self._first_of_call(each)):
            call = next(later for later in rest if later.name == "CALL")
            operands = call.argument + (1 if call in null_below else 2)
            yield from self._replace(operands, line)
        elif name == "CALL_FUNCTION_EX":
            yield from self._observe(self._observer("contents"), 1 + (each.argument & 1), line)
            yield from self._replace(2 + (each.argument & 1), line, "unpacked")
        self._last = each

    _last: _Instruction | None = None

    def _first_of_call(self, _: _Instruction) -> bool:
        return self._last is None or self._last.name != "KW_NAMES"

    def _itself(self, each: _Instruction) -> Iterator[_Instruction]:
        if each.name == "LOAD_METHOD":  # so that what is called lies in one place, whatever it is
            yield _Instruction("PUSH_NULL", 0, each.line)
            yield _Instruction("SWAP", 2, each.line)
            yield _Instruction("LOAD_ATTR", each.argument, each.line)
        else:
            yield each

    def _observe(self, observer: int, operands: int, line: int | None, *text: str) -> Iterator[_Instruction]:
        yield from self._call(observer, operands, line, *text)
        yield _Instruction("POP_TOP", 0, line)

    def _replace(self, operands: int, line: int | None, observer: str = "called") -> Iterator[_Instruction]:
        """Let the observer of calls say what is called: the lowest of the operands."""
        yield from self._call(self._observer(observer), operands, line)
        yield _Instruction("SWAP", operands + 1, line)
        yield _Instruction("POP_TOP", 0, line)

    def _call(self, observer: int, operands: int, line: int | None, *text: str) -> Iterator[_Instruction]:
        yield _Instruction("PUSH_NULL", 0, line)
        yield _Instruction("LOAD_CONST", observer, line)
        for each in text:
            yield _Instruction("LOAD_CONST", self._constant(each), line)
        for _ in range(operands):
            yield _Instruction("COPY", operands + 2 + len(text), line)
        yield _Instruction("PRECALL", operands + len(text), line)
        yield _Instruction("CALL", operands + len(text), line)

    def _observer(self, name: str) -> int:
        return self._constant(self._observers[name])

    def _constant(self, value: Any) -> int:
        if id(value) not in self._places:
            self._places[id(value)] = len(self._constants)
            self._constants.append(value)
        return self._places[id(value)]


def _lay_out(instructions: list[_Instruction]) -> None:
    """Give each instruction its offset, and each jump its distance, until neither changes the other."""
    moved = True
    while moved:
        moved, offset = False, 0
        for each in instructions:
            moved |= each.offset != offset
            each.offset = offset
            offset += each.size
        for each in instructions:
            if each.target is not None:
                distance = abs(each.target.offset - each.offset - each.size) // 2
                moved |= distance != each.argument
                each.argument = distance


def _exception_table(
    handled: list[_Handled], first: Mapping[_Instruction, _Instruction], edited: list[_Instruction]
) -> bytes:
    end = edited[-1].offset + edited[-1].size
    table = bytearray()
    for each in handled:
        start = first[each.start].offset
        stop = end if each.stop is None else first[each.stop].offset
        numbers = (start // 2, (stop - start) // 2, first[each.target].offset // 2, each.depth << 1 | each.lasti)
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


def _line_table(instructions: list[_Instruction], first_line: int) -> bytes:
    """Encode lines alone, without columns: code 13 of the format, and 15 where there is no line."""
    table, line = bytearray(), first_line
    for each in instructions:
        units = each.size // 2
        while units:
            length = min(units, 8)
            units -= length
            if each.line is None:
                table.append(0x80 | 15 << 3 | length - 1)
                continue
            change = each.line - line
            line = each.line
            table.append(0x80 | 13 << 3 | length - 1)
            value = (-change << 1 | 1) if change < 0 else change << 1
            while value > 63:
                table.append(64 | value & 63)
                value >>= 6
            table.append(value)
    return bytes(table)
