"""What the overloads of torch's operators take, read once: torch's own schemas answer every question anew."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of an overload."""

    name: str
    kind: str
    """Its type, without `Optional`."""
    optional: bool
    listed: bool
    """Whether it takes a list; of any number of elements, if `number` is not given."""
    number: int | None
    named: bool
    """Whether it is given by keyword alone."""
    required: bool
    default: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """One overload of an operator of ATen."""

    operator: str
    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]
    places: int
    """How many parameters may be given by place."""


@functools.cache
def overload_of(target: torch._ops.OpOverload) -> Overload:
    """Return what one overload takes."""
    return _read(target._schema)


@functools.cache
def overloads(name: str) -> tuple[Overload, ...]:
    """Return the overloads of an operator of ATen that work on tensors, without those that write to `out=`.

    Those with the fewest parameters come first.
    """
    found = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    kept = (
        _read(each)
        for each in found
        if each.arguments and "Tensor" in str(each.arguments[0].type) and not any(a.is_out for a in each.arguments)
    )
    return tuple(sorted(kept, key=lambda each: len(each.names)))


def _read(schema: Any) -> Overload:
    parameters = tuple(map(_read_parameter, schema.arguments))
    return Overload(
        operator=str(schema.name).split("::")[1],
        parameters=parameters,
        names=tuple(each.name for each in parameters),
        places=sum(not each.named for each in parameters),
    )


def _read_parameter(argument: Any) -> Parameter:
    written, default = str(argument.type), argument.default_value
    optional = written.startswith("Optional[")
    return Parameter(
        name=argument.name,
        kind=written.removeprefix("Optional[").rstrip("]") if optional else written,
        optional=optional,
        listed="List[" in written,
        number=argument.N,
        named=argument.kwarg_only,
        required=not argument.has_default_value(),
        default=default,
    )
