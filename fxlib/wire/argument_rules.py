"""Arguments that may not travel because torch's operators would reach outside of their tensors with them.

- An operator of `torch.ops` takes any integer for a dtype, a layout or a memory format, and looks it up in tables of
  its own without a bounds check. Therefore these must be constants of a graph.
- A tensor of another layout than strided holds indices that its operators trust. Therefore no graph may make one.
- The overload that writes to `out=` is tried as an operator of its own: if it is refused, so is the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import memory_safety
from fxlib.wire.faults import Fault
from fxlib.wire.names import DTYPES, LAYOUTS, MEMORY_FORMATS
from fxlib.wire.targets import registered_operators

T = TypeVar("T")
_CONSTANTS = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}
"""Classes of constants, by the types in a schema for which torch accepts any integer."""
NODE = object()
"""Stands for a value that only a run of the graph has: a tensor, or a number that it computes."""
ArgumentCheck = Callable[[object], str]
"""Returns what is wrong with an argument, or ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentRule:
    """A condition on one argument."""

    name: str
    """Keyword of the argument."""
    positions: frozenset[int]
    """Positions of the argument if it is given without keyword."""
    check: ArgumentCheck

    def values(self, args: Sequence[T], kwargs: Mapping[str, T]) -> list[T]:
        """Return the values of the argument in a call, if it is given."""
        found = [args[position] for position in self.positions if position < len(args)]
        if self.name in kwargs:
            found.append(kwargs[self.name])
        return found


def _small(value: object) -> str:
    if value is None or (isinstance(value, int) and 0 <= value < 1 << 40):
        return ""
    return "must be a constant from 0 to 2 ** 40: torch adds it to an address unchecked"


RULES: Mapping[str, tuple[ArgumentRule, ...]] = {
    **dict.fromkeys(
        (
            *("aten::as_strided.default", "aten::as_strided_.default", "torch.as_strided", "torch.Tensor.as_strided"),
            *(
                "torch.as_strided_",
                "torch.Tensor.as_strided_",
                "torch.as_strided_copy",
                "aten::as_strided_copy.default",
            ),
        ),
        (ArgumentRule(name="storage_offset", positions=frozenset({3}), check=_small),),
    ),
}
"""Rules of operators that stay inside of their tensors only under these rules, as tests have shown."""


def check_arguments(rules: Iterable[ArgumentRule], name: str, node: pb.Node | pb.QuestionStep) -> None:
    """Raise Fault if a rule refuses an argument of an operator or function of torch."""
    kwargs = {each.name: each.value for each in node.kwargs} if node.kwargs else {}
    for rule in rules:
        for value in rule.values(node.args, kwargs):
            if wrong := rule.check(_plain(value)):
                raise Fault(f"{name} may not travel as it is called: argument {rule.name!r} {wrong}")


def broken(rules: Iterable[ArgumentRule], args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a rule refuses the arguments of a call."""
    return any(rule.check(value) for rule in rules for value in rule.values(args, kwargs))


@cache
def rules_of(name: str) -> tuple[ArgumentRule, ...]:
    """Return the rules for the arguments of an operator ("aten::add.Tensor") or function ("torch.add")."""
    return (*RULES.get(name, ()), *_rules(name))


def _plain(value: pb.Value) -> object:
    kind = value.WhichOneof("kind")
    match kind:
        case "none":
            return None
        case "boolean" | "integer" | "real" | "text":
            return getattr(value, kind)
        case "dtype":
            return DTYPES.get(value.dtype, NODE)
        case "layout":
            return LAYOUTS.get(value.layout, NODE)
        case "memory_format":
            return MEMORY_FORMATS.get(value.memory_format, NODE)
        case "list" | "tuple":
            return [_plain(each) for each in getattr(value, kind).items]
    return NODE


def _rules(name: str) -> Iterator[ArgumentRule]:
    if "::" in name:
        constants: dict[tuple[str, str], set[int]] = {}
        for schema in _schemas(name):
            for position, each in enumerate(schema.arguments):
                kind = str(each.real_type).removeprefix("Optional[").removesuffix("]")
                if kind in _CONSTANTS:
                    constants.setdefault((each.name, kind), set()).update(() if each.kwarg_only else (position,))
        for (argument, kind), positions in constants.items():
            yield ArgumentRule(name=argument, positions=frozenset(positions), check=_constant(_CONSTANTS[kind]))
    if not _may_write_out(name):
        yield ArgumentRule(name="out", positions=frozenset(), check=_absent)


def _schemas(name: str) -> list[Any]:
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet: Any = getattr(getattr(torch.ops, space), base)
    return [getattr(packet, each)._schema for each in ([overload] if overload else packet.overloads())]


def _constant(kind: type) -> ArgumentCheck:
    def check(value: object) -> str:
        if value is None or isinstance(value, kind):
            return ""
        return f"must be a constant of {kind.__name__}: torch would look any number up, unchecked"

    return check


def _absent(value: object) -> str:
    return "" if value is None else "may not be written to. Use copy_ on the result"


def _may_write_out(name: str) -> bool:
    """Return whether all variants of a function that write to their arguments were tested."""
    if "::" in name and "." in name:
        return True  # it is one of them itself, or has no such argument
    name = _WRITTEN_BY.get(name, name)
    packet = name if "::" in name else "aten::" + _SPACES.get(name.rpartition(".")[0], "") + name.rpartition(".")[2]
    overloads = [f"{packet}.{each}" for each in registered_operators().get(packet, ())]
    outs = [each for each in overloads if any(argument.is_out for argument in _schemas(each)[0].arguments)]
    return bool(outs) and all(each in memory_safety.safe() for each in outs)


_WRITTEN_BY = {"torch.nn.functional.normalize": "torch.div"}
"""Functions written in Python that pass their `out=` to one operator and nothing else; spectral norms call this one."""
_SPACES = {"torch.special": "special_", "torch.linalg": "linalg_", "torch.fft": "fft_"}
