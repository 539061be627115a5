"""Arguments of a node: by name, however written; what overloads accept; and what the operator does to them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fxlib.analysis.operators import operator_tables as words
from fxlib.analysis.operators.schemas import OperatorFacts, facts_of, flags_of

_SWITCHES = words.FLAGS | words.CHECKING | {"out"}
"""Arguments that change what an operator does."""


def operator_of(node: Node) -> OperatorFacts | None:
    """Return what a `call_function` or `call_method` node does with its own arguments; None if it may do anything."""
    found = facts_of(node.target)
    return _as_called(found, node) if found is not None and depends_on_arguments(node) else found


def depends_on_arguments(node: Node) -> bool:
    """Return whether another node with the same target may do something else."""
    return bool(flags_of(node.target)) or not _SWITCHES.isdisjoint(node.kwargs)


class _Switched(NamedTuple):
    """The changes that the arguments of one call make to its operator."""

    out: bool
    """Whether it writes its result to `out=`."""
    in_place: bool
    """Whether `inplace=` has it write its first argument."""
    idle: bool
    """Whether it draws no random numbers and updates no statistics, as in eval mode."""
    renormalizes: bool
    """Whether `max_norm=` has it write its weight."""
    plain: bool
    """Whether it reads an attribute that holds none of a tensor's memory."""
    indexes: bool
    """Whether its index is a value, too, which may be out of bounds."""
    checks: bool
    """Whether it raises for some values: it rounds a quotient of integers, or was asked to check them."""


def _as_called(found: OperatorFacts, node: Node) -> OperatorFacts:
    """Account for `out=`, `inplace=`, `training=` and the like."""
    name = found.name
    switched = _Switched(
        out=node.kwargs.get("out") is not None,
        in_place=_is_on(node, "inplace"),
        idle=_flag(node, "training") is False or _flag(node, "train") is False or _drops_nothing(node, name),
        renormalizes=name in words.RENORMALIZE and _is_on(node, "max_norm"),
        plain=name == "getattr" and node.args[1] in words.PLAIN_ATTRIBUTES,
        indexes=name == "getitem" and len(node.all_input_nodes) > 1,
        checks=any(node.kwargs.get(each) not in (None, False) for each in words.CHECKING),
    )
    return _variant(found, switched)


def _drops_nothing(node: Node, name: str) -> bool:
    """Return whether a node is attention without dropout, which draws no random numbers."""
    return name == "scaled_dot_product_attention" and _flag(node, "dropout_p") in (None, 0.0)


@functools.cache
def _variant(found: OperatorFacts, switched: _Switched) -> OperatorFacts:
    keeps_statistics = switched.idle and found.name in words.RUNNING_STATISTICS
    writes = frozenset() if keeps_statistics else found.writes
    writes |= {"out"} if switched.out else frozenset()
    writes |= {0, "input"} if switched.in_place else frozenset()
    writes |= {1, "weight"} if switched.renormalizes else frozenset()
    returns_argument = switched.out or switched.in_place
    return replace(
        found,
        writes=writes,
        shares=(found.shares or returns_argument) and not switched.plain,
        shared=None if returns_argument else found.shared,
        same=(found.same or returns_argument) and not switched.plain,
        random=found.random and not switched.idle,
        raises=found.raises or switched.indexes or switched.checks,
        gradient=found.gradient and not switched.plain,
    )


def written_arguments(node: Node, found: OperatorFacts) -> Iterator[Node]:
    """Yield the nodes whose memory the operator writes when called as in `node`."""
    return _at(node, found.writes)


def shared_arguments(node: Node, found: OperatorFacts) -> Iterable[Node]:
    """Return the nodes whose memory the operator's result may share."""
    return node.all_input_nodes if found.shared is None else _at(node, found.shared)


def _at(node: Node, positions: Iterable[int | str]) -> Iterator[Node]:
    for position in positions:
        if isinstance(position, str):
            value = node.kwargs.get(position)
        else:
            value = node.args[position] if position < len(node.args) else None
        yield from nodes_in(value)


def nodes_in(value: object) -> Iterator[Node]:
    """Yield the nodes in one argument, however nested."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from nodes_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from nodes_in(each)
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))


def _is_on(node: Node, name: str) -> bool:
    value = _flag(node, name)
    return value is not None and value is not False


def _flag(node: Node, name: str) -> object:
    """Return the value of an argument that changes what the operator does; None if it is not given."""
    if name in node.kwargs:
        return node.kwargs[name]
    position = flags_of(node.target).get(name)
    return node.args[position] if position is not None and position < len(node.args) else None


def frozen(value: Any) -> Hashable:
    """Return a key that distinguishes arguments, including types and signs of zeros."""
    if isinstance(value, Node):
        return value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, dict):
        return "dict", tuple((frozen(key), frozen(each)) for key, each in value.items())
    if isinstance(value, slice):
        return "slice", frozen((value.start, value.stop, value.step))
    return type(value), repr(value)


@functools.cache
def _names_of(target: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters, in order; empty if they are unknown."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(argument.name for argument in target._schema.arguments)
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin: its schema has them
        found = facts_of(target)
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{found.name}") if found is not None else ()
        return tuple(argument.name for argument in schemas[0].arguments) if schemas else ()


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments that a `call_function` node gives, by name; omitted arguments have no entry."""
    return dict(zip(_names_of(node.target), node.args, strict=False)) | dict(node.kwargs)


def replace_arguments(node: Node, **values: Any) -> None:
    """Give some arguments of a `call_function` node other values, by name; omitted arguments may be added."""
    names = _names_of(node.target)
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in values.items():
        position = names.index(name)
        if position < len(args):
            args[position] = value
        else:
            kwargs[name] = value
    node.args, node.kwargs = tuple(args), kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadParameter:
    """One parameter of an overload."""

    name: str
    kind: str
    """Its type, without `Optional`."""
    optional: bool
    listed: bool
    """Whether it takes a list; the list may have any length if `number` is not given."""
    number: int | None
    named: bool
    """Whether it is keyword-only."""
    required: bool
    default: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadSignature:
    """One overload of an operator of ATen."""

    operator: str
    parameters: tuple[OverloadParameter, ...]
    names: tuple[str, ...]
    positional: int
    """Number of positional parameters."""


@functools.cache
def overload_of(target: torch._ops.OpOverload) -> OverloadSignature:
    """Return the parameters of one overload."""
    return _read(target._schema)


@functools.cache
def overloads(name: str) -> tuple[OverloadSignature, ...]:
    """Return the overloads of an operator of ATen that work on tensors, without those that write to `out=`.

    Overloads with the fewest parameters come first.
    """
    found = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    kept = (
        _read(each)
        for each in found
        if each.arguments and "Tensor" in str(each.arguments[0].type) and not any(a.is_out for a in each.arguments)
    )
    return tuple(sorted(kept, key=lambda each: len(each.names)))


def _read(schema: Any) -> OverloadSignature:
    parameters = tuple(map(_read_parameter, schema.arguments))
    return OverloadSignature(
        operator=str(schema.name).split("::")[1],
        parameters=parameters,
        names=tuple(each.name for each in parameters),
        positional=sum(not each.named for each in parameters),
    )


def _read_parameter(argument: Any) -> OverloadParameter:
    written, default = str(argument.type), argument.default_value
    optional = written.startswith("Optional[")
    return OverloadParameter(
        name=argument.name,
        kind=written.removeprefix("Optional[").rstrip("]") if optional else written,
        optional=optional,
        listed="List[" in written,
        number=argument.N,
        named=argument.kwarg_only,
        required=not argument.has_default_value(),
        default=default,
    )
