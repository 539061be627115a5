"""Decisions of a program by the values of its arguments ("is anything masked?"), as data; each call checks them.

A question is a list of operators over the leaves of the arguments. It has only operators that compare, select and add
up; none of them writes, draws, or reads anything but its arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

_NAMES = (
    *("all", "any", "sum", "cumsum", "diff", "max", "min", "amax", "amin", "abs", "isnan", "isinf", "numel"),
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "rsub", "__and__", "__or__"),
    *("logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or"),
    *("slice", "select", "narrow", "unsqueeze", "squeeze", "view", "reshape", "expand", "permute", "transpose", "cat"),
    *("stack", "flatten", "alias", "detach", "clone", "contiguous", "to", "_to_copy", "sym_size", "sym_numel"),
    *("arange", "ones", "zeros", "full", "ones_like", "zeros_like", "new_ones", "new_zeros"),
)


def _operators() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "eq", "ne", "lt", "le")
    }
    for name in _NAMES:
        packet: Any = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            each: OpOverload = getattr(packet, overload)
            if not each._schema.is_mutable:
                found[each.name() if "." in each.name() else f"{each.name()}.default"] = each
    return found


OPERATORS: Mapping[str, Callable[..., Any]] = _operators()
"""The operators of which a question may consist, by name: operators of aten, and arithmetic on sizes."""
_BY_OPERATOR = {function: name for name, function in OPERATORS.items()}
MAX_STEPS = 64
"""The largest number of operators in one condition; all of them run at every call."""


def operator_name(function: object) -> str | None:
    """Return the name of an operator that a question may hold; None for any other."""
    try:
        return _BY_OPERATOR.get(function)  # type: ignore[call-overload]
    except TypeError:
        return None


@dataclass(frozen=True, slots=True)
class Reference:
    """The index of a leaf of the arguments or, counting on from the leaves, of the result of a step."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operator, by its name in `OPERATORS`; its arguments are immediate values, references, and tuples of them."""

    operator: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCondition:
    """A question about the arguments, and the answer for which the graph is valid."""

    steps: tuple[Step, ...]
    answer: bool
    source: str = ""
    """The file and line of the statement that decides."""

    def ask(self, leaves: Sequence[Any]) -> bool:
        """Return the answer for these leaves.

        Raises:
            Exception: an operator does not accept them.
        """
        values = list(leaves)
        with torch.no_grad():
            for step in self.steps:
                kwargs = {name: _filled(value, values) for name, value in step.kwargs}
                values.append(OPERATORS[step.operator](*[_filled(each, values) for each in step.args], **kwargs))
        return bool(values[-1])

    def misfit(self, leaves: Sequence[Any]) -> str:
        """Return in words that the answer for these leaves differs; empty if it is the same."""
        try:
            fits = self.ask(leaves) is self.answer
        except Exception as error:  # noqa: BLE001 - whatever the error, the graph is not valid for these leaves
            return f"what was asked of the values of arguments at {self.source} cannot be asked: {error}"
        if fits:
            return ""
        return f"the values of arguments answer what is asked at {self.source} by {not self.answer}"


def _filled(value: Any, values: Sequence[Any]) -> Any:
    if isinstance(value, Reference):
        return values[value.index]
    return [_filled(each, values) for each in value] if isinstance(value, tuple) else value
