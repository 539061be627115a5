"""Signatures of targets: the arguments of a node by name, however they were written, and what overloads take."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxlib.analysis.operators.schemas import facts_of


@functools.cache
def names_of(target: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters, in order; empty if they are not known."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin: its schema tells
        found = facts_of(target)
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{found.name}") if found is not None else ()
        return tuple(argument.name for argument in schemas[0].arguments) if schemas else ()


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments that a `call_function` node gives, by name; those left out have no entry."""
    return dict(zip(names_of(node.target), node.args, strict=False)) | dict(node.kwargs)


def replace_arguments(node: Node, **values: Any) -> None:
    """Give a `call_function` node other values for some of its arguments, by name; what it leaves out may be added."""
    names = names_of(node.target)
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in values.items():
        place = names.index(name)
        if place < len(args):
            args[place] = value
        else:
            kwargs[name] = value
    node.args, node.kwargs = tuple(args), kwargs


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
    """Number of parameters that may be given by place."""


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
