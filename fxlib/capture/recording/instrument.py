"""Instrumentation: copies of code objects that call observers before instructions that read or write state.

An observer is a function that is called with the operands of an instruction before it runs, copied from the stack; the
program does not notice. The observer of a call returns the function to call. Code objects inside a code object are
instrumented as well.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from fxlib.capture.recording.bytecode import NULL_IS_ABOVE, VERSION, Handled, Instruction, Position, assembled, read

Observer = Callable[..., Any]

ENTRY = "where a function begins"
"""The constant that the observer of entries replaces, one for each function, as functions may share their code."""

_OPERANDS: dict[str, tuple[str, int]] = {
    "LOAD_ATTR": ("attribute", 1), "LOAD_METHOD": ("attribute", 1), "IMPORT_FROM": ("attribute", 1),
    "IMPORT_NAME": ("imported", 2),
    "STORE_ATTR": ("stored", 1), "DELETE_ATTR": ("stored", 1),
    "BINARY_SUBSCR": ("item", 2), "BINARY_SLICE": ("item", 3),
    "STORE_SUBSCR": ("item_stored", 2), "DELETE_SUBSCR": ("item_stored", 2), "STORE_SLICE": ("item_stored", 3),
    "CONTAINS_OP": ("contained", 2), "IS_OP": ("identity", 2),
    "COMPARE_OP": ("operands", 2), "BINARY_OP": ("operands", 2), "UNARY_POSITIVE": ("operands", 1),
    "UNARY_NEGATIVE": ("operands", 1), "UNARY_INVERT": ("operands", 1),
    "JUMP_IF_FALSE_OR_POP": ("truth", 1), "JUMP_IF_TRUE_OR_POP": ("truth", 1),
    "POP_JUMP_FORWARD_IF_FALSE": ("truth", 1), "POP_JUMP_FORWARD_IF_TRUE": ("truth", 1),
    "POP_JUMP_BACKWARD_IF_FALSE": ("truth", 1), "POP_JUMP_BACKWARD_IF_TRUE": ("truth", 1),
    "POP_JUMP_FORWARD_IF_NONE": ("none", 1), "POP_JUMP_FORWARD_IF_NOT_NONE": ("none", 1),
    "POP_JUMP_BACKWARD_IF_NONE": ("none", 1), "POP_JUMP_BACKWARD_IF_NOT_NONE": ("none", 1),
    "POP_JUMP_IF_NONE": ("none", 1), "POP_JUMP_IF_NOT_NONE": ("none", 1),
    "GET_ITER": ("contents", 1), "GET_YIELD_FROM_ITER": ("contents", 1), "UNPACK_SEQUENCE": ("contents", 1),
    "UNPACK_EX": ("contents", 1), "LIST_EXTEND": ("contents", 1), "SET_UPDATE": ("contents", 1),
    "DICT_UPDATE": ("contents", 1), "DICT_MERGE": ("contents", 1), "GET_LEN": ("contents", 1),
    "MATCH_MAPPING": ("contents", 1), "MATCH_SEQUENCE": ("contents", 1), "MATCH_KEYS": ("contents", 2),
    "MATCH_CLASS": ("matched", 3), "BEFORE_WITH": ("entered", 1),
    "FORMAT_VALUE": ("formatted", 1), "CONVERT_VALUE": ("formatted", 1), "FORMAT_SIMPLE": ("formatted", 1),
    "FORMAT_WITH_SPEC": ("formatted", 2),
}  # fmt: skip
"""The observer for each instruction of any version, and the number of operands it gets, as they lie on the stack."""
_TRUTHS = {"TO_BOOL"} if "TO_BOOL" in dis.opmap else {"UNARY_NOT", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"}
"""Instructions that test the truth of a value; apart from comparisons, there is a single one since 3.13."""
_OPERANDS |= dict.fromkeys(_TRUTHS, ("truth", 1))
_POSITIVE = 5
"""The number of the intrinsic function for `+x`, since 3.12."""
_AS_BOOL = 16
"""The bit in a comparison's argument that converts its result to true or false, since 3.13."""
_NAMED = frozenset({"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "IMPORT_NAME", "STORE_ATTR", "DELETE_ATTR"})
_WRITTEN_GLOBALS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_WRITTEN_CELLS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_READ_GLOBALS = frozenset({"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", *_WRITTEN_GLOBALS})
_CALLS = frozenset({"CALL", "CALL_KW"})
_LOAD_CELL = "LOAD_FAST" if NULL_IS_ABOVE else "LOAD_CLOSURE"
"""The instruction that puts a variable's cell on the stack; `LOAD_CLOSURE` is no longer a separate one since 3.13."""
_HEAD_OF_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
_DEEPEST = 8
"""Number of stack entries that the instructions around an observer need, besides copies of operands."""


def globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a code object reads or writes, without those of code inside it."""
    return tuple(dict.fromkeys(filter(None, (_global(each, code.co_names) for each in read(code)[0]))))


def _global(each: Instruction, names: tuple[str, ...]) -> str | None:
    if each.name == "LOAD_GLOBAL":
        return names[each.argument >> 1]
    return names[each.argument] if each.name in _READ_GLOBALS else None


def instrumented(code: CodeType, observers: Mapping[str, Observer], nested: Callable[[CodeType], CodeType]) -> CodeType:
    """Return a copy of `code` that calls the observers; `nested` converts the code objects inside it."""
    instructions, handled = read(code)
    constants = [nested(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    editor = _Editor(observers, constants, code, _with_null(instructions, handled))
    edited, first = editor.edit(instructions)
    deepest = max((each.argument for each in instructions if each.name in _CALLS), default=0)
    stack = code.co_stacksize + deepest + _DEEPEST
    return assembled(code, edited, handled, first, constants=tuple(constants), stack=stack)


def _with_null(instructions: Sequence[Instruction], handled: Sequence[Handled]) -> set[Instruction]:
    """Return the calls for which a NULL is on the stack, rather than an object bound to the called function."""
    place = {each: index for index, each in enumerate(instructions)}
    todo: list[tuple[int, list[bool]]] = [(0, [])]
    todo += [(place[each.target], [False] * (each.depth + each.lasti + 1)) for each in handled]
    seen: set[int] = set()
    found: set[Instruction] = set()
    while todo:
        index, stack = todo.pop()
        while index not in seen and index < len(instructions):
            seen.add(index)
            each = instructions[index]
            if each.name in _CALLS and stack[-_position_of_null(each)]:
                found.add(each)
            if each.target is not None:
                todo.append((place[each.target], _after(each, stack.copy(), jump=True)))
            stack = _after(each, stack, jump=False)
            if each.ends:
                break
            index += 1
    return found


def _position_of_null(call: Instruction) -> int:
    """Return how far below the top of the stack a call looks for its NULL or the bound object."""
    return call.argument + (1 if NULL_IS_ABOVE else 2) + (call.name == "CALL_KW")


def _after(each: Instruction, stack: list[bool], *, jump: bool) -> list[bool]:
    """Return for each position of the stack whether it holds a NULL after an instruction."""
    argument, name = each.argument, each.name
    pair = [False, True] if NULL_IS_ABOVE else [True, False]
    if name in _CALLS:
        return [*stack[: -argument - 2 - (name == "CALL_KW")], False]
    if name == "PRECALL":
        return stack
    if name == "SWAP":
        stack[-1], stack[-argument] = stack[-argument], stack[-1]
        return stack
    if name == "COPY":
        return [*stack, stack[-argument]]
    if name == "PUSH_NULL":
        return [*stack, True]
    if name == "LOAD_GLOBAL" and argument & 1:
        return [*stack, *pair]
    if _is_method(each):
        return [*stack[: -3 if name == "LOAD_SUPER_ATTR" else -1], *pair]
    has_argument = dis.opmap[name] >= dis.HAVE_ARGUMENT
    effect = dis.stack_effect(dis.opmap[name], argument if has_argument else None, jump=jump)
    return stack[:effect] if effect < 0 else stack + [False] * effect


def _is_method(each: Instruction) -> bool:
    """Return whether an instruction looks up an attribute in order to call it."""
    in_argument = each.name == "LOAD_SUPER_ATTR" or (each.name == "LOAD_ATTR" and VERSION >= (3, 12))
    return each.name == "LOAD_METHOD" or (in_argument and bool(each.argument & 1))


class _Editor:
    """Inserts observers into one code object."""

    def __init__(
        self, observers: Mapping[str, Observer], constants: list[Any], code: CodeType, with_null: set[Instruction]
    ) -> None:
        self._observers, self._constants, self._names, self._with_null = observers, constants, code.co_names, with_null
        self._variable: Callable[[int], str] = code._varname_from_oparg  # type: ignore[attr-defined]
        self._places: dict[int, int] = {}
        self._last: Instruction | None = None

    def edit(self, instructions: Sequence[Instruction]) -> tuple[list[Instruction], dict[Instruction, Instruction]]:
        """Return the new instructions, and for each original one the first that replaces it."""
        edited: list[Instruction] = []
        first: dict[Instruction, Instruction] = {}
        begun = False
        for index, each in enumerate(instructions):
            begin = len(edited)
            edited += self._before(each, instructions, index)
            edited += self._itself(each)
            first[each] = edited[begin]
            if each.name == "RESUME" and not begun:
                begun = True
                edited += self._observe(self._constant(ENTRY), 0, each.position)
            self._last = each
        for each in edited:
            if each.target is not None:
                each.target = first[each.target]
        return edited, first

    def _before(self, each: Instruction, instructions: Sequence[Instruction], index: int) -> Iterator[Instruction]:
        name, position = each.name, each.position
        if name in _OPERANDS:
            observer, operands = _OPERANDS[name]
            operands += name == "FORMAT_VALUE" and bool(each.argument & 4)  # the format is an operand as well
            text = (self._name(each),) if name in _NAMED else ()
            yield from self._observe(self._observer(observer), operands, position, *text)
        elif name == "LOAD_SUPER_ATTR":
            yield from self._observe(self._observer("attribute_of_super"), 3, position, self._name(each))
        elif name == "CALL_INTRINSIC_1" and each.argument == _POSITIVE:
            yield from self._observe(self._observer("operands"), 1, position)
        elif name in _WRITTEN_GLOBALS:
            yield from self._observe(self._observer("global_stored"), 0, position, self._names[each.argument])
        elif name in _WRITTEN_CELLS:
            cell = Instruction(_LOAD_CELL, each.argument, position)
            yield from self._call(self._observer("cell_stored"), position, (self._variable(each.argument),), (), cell)
            yield Instruction("POP_TOP", 0, position)
        elif name in ("KW_NAMES", "CALL_KW") or (name == _HEAD_OF_CALL and self._is_first_of_call()):
            call = next(later for later in instructions[index:] if later.name in _CALLS)
            called = self._observer("called")
            yield from self._replace(
                called, call.argument, position, null=call in self._with_null, above=name == "CALL_KW"
            )
        elif name == "CALL_FUNCTION_EX":
            keywords = each.argument & 1
            yield from self._observe(self._observer("contents"), 1 + keywords, position)
            yield from self._replace(self._observer("unpacked"), 1 + keywords, position, null=True)

    def _is_first_of_call(self) -> bool:
        return self._last is None or self._last.name != "KW_NAMES"

    def _name(self, each: Instruction) -> str:
        if each.name == "LOAD_SUPER_ATTR":
            return self._names[each.argument >> 2]
        return self._names[each.argument >> (each.name == "LOAD_ATTR" and VERSION >= (3, 12))]

    def _itself(self, each: Instruction) -> Iterator[Instruction]:
        if each.name == "COMPARE_OP" and VERSION >= (3, 13) and each.argument & _AS_BOOL:
            yield _changed(each, "COMPARE_OP", each.argument & ~_AS_BOOL)
            yield from self._observe(self._observer("truth"), 1, each.position)
            yield Instruction("TO_BOOL", 0, each.position)
        elif _is_method(each):  # so that the called object always lies in one position
            name = "LOAD_ATTR" if each.name == "LOAD_METHOD" else each.name
            looked_up = _changed(each, name, each.argument if each.name == "LOAD_METHOD" else each.argument & ~1)
            null = Instruction("PUSH_NULL", 0, each.position)
            yield from (looked_up, null) if NULL_IS_ABOVE else (looked_up, null, Instruction("SWAP", 2, each.position))
        else:
            yield each

    def _observe(self, observer: int, operands: int, position: Position, *text: str) -> Iterator[Instruction]:
        yield from self._call(observer, position, text, [operands] * operands)
        yield Instruction("POP_TOP", 0, position)

    def _replace(
        self, observer: int, operands: int, position: Position, *, null: bool, above: bool = False
    ) -> Iterator[Instruction]:
        """Let an observer of calls decide which function is called.

        Args:
            observer: the index of the observer among the constants.
            operands: the number of arguments of the call, without an object bound to the function.
            position: the position in the program's source.
            null: whether nothing is bound to the function.
            above: whether the keyword names lie on top of the stack.
        """
        called = operands + above + (2 if NULL_IS_ABOVE or not null else 1)
        between = operands + above + (0 if null else 1)
        count = operands + (0 if null else 1)
        yield from self._call(observer, position, (), [called, *([between + 1] * count)])
        yield Instruction("SWAP", called + 1, position)
        yield Instruction("POP_TOP", 0, position)

    def _call(
        self, observer: int, position: Position, text: Sequence[str], copied: Sequence[int], *more: Instruction
    ) -> Iterator[Instruction]:
        """Call an observer with texts, copies of stack entries, and the values that further instructions load.

        The depths of the copied entries are those before the call, plus one for each entry copied before.
        """
        begin = [Instruction("PUSH_NULL", 0, position), Instruction("LOAD_CONST", observer, position)]
        yield from reversed(begin) if NULL_IS_ABOVE else begin
        for each in text:
            yield Instruction("LOAD_CONST", self._constant(each), position)
        for depth in copied:
            yield Instruction("COPY", depth + 2 + len(text), position)
        yield from more
        operands = len(text) + len(copied) + len(more)
        if _HEAD_OF_CALL == "PRECALL":
            yield Instruction("PRECALL", operands, position)
        yield Instruction("CALL", operands, position)

    def _observer(self, name: str) -> int:
        return self._constant(self._observers[name])

    def _constant(self, value: Any) -> int:
        if id(value) not in self._places:
            self._places[id(value)] = len(self._constants)
            self._constants.append(value)
        return self._places[id(value)]


def _changed(each: Instruction, name: str, argument: int) -> Instruction:
    return Instruction(name, argument, each.position)
