"""The conditions of a graph on its inputs, in the wire format; see `fxlib.runtime.guards.export_guards`."""

from __future__ import annotations

from typing import Any

from fxlib.runtime.guards.export_guards import OPERATIONS, Guard, InputGuards, TensorGuard, ValueGuard, symbols_of
from fxlib.runtime.guards.value_conditions import MAX_STEPS, OPERATORS, Reference, Step, ValueCondition
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.argument_rules import check_arguments, rules_of
from fxlib.wire.check_values import Position, check_value
from fxlib.wire.faults import Fault, Limits
from fxlib.wire.names import DTYPES, check_device, check_name, check_text
from fxlib.wire.targets import check_operator
from fxlib.wire.values import ValueReader, ValueWriter

_ARITY = {"not": 1} | dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "mod", "floordiv"), 2)
_PARTS = 256
"""Maximum number of parts of one expression, which every call evaluates."""
_VALUES = ("none", "boolean", "integer", "big_integer", "real", "text")


def write_guards(message: pb.InputGuards, guards: InputGuards) -> None:
    """Write guards into an empty message.

    Raises:
        Fault: a guard holds a value that cannot travel.
    """
    message.SetInParent()
    writer = ValueWriter()
    for leaf in guards.leaves:
        each = message.leaves.add()
        if isinstance(leaf, ValueGuard):
            writer.write(each.value, leaf.value)
        else:
            each.tensor.dtype = str(leaf.dtype).removeprefix("torch.")
            each.tensor.device, each.tensor.contiguous = leaf.device, leaf.strides is None
            for size in leaf.sizes:
                writer.write(each.tensor.sizes.add(), size)
            for stride in leaf.strides or ():
                writer.write(each.tensor.strides.add(), stride)
            if leaf.requires_grad is not None:
                each.tensor.requires_grad = leaf.requires_grad
            if leaf.same_as is not None:
                each.tensor.same_as = leaf.same_as
    for symbol, least, greatest in guards.ranges:
        message.ranges.add(symbol=symbol, least=least, greatest=greatest)
    for condition in guards.conditions:
        writer.write(message.conditions.add(), condition)
    for device, dtype in guards.autocast:
        message.autocast.add(device=device, dtype=dtype)
    message.ordered.extend(guards.ordered)
    for asked in guards.values:
        _write_condition(message.values.add(), asked)


def read_guards(message: pb.InputGuards) -> InputGuards:
    """Return the guards of a checked message."""
    reader = ValueReader()
    ranges = [
        (each.symbol, each.least, each.greatest if each.HasField("greatest") else None) for each in message.ranges
    ]
    return InputGuards(
        leaves=tuple(_read_leaf(each, reader) for each in message.leaves),
        ranges=tuple(ranges),
        conditions=tuple(reader.read(each) for each in message.conditions),
        autocast=tuple((each.device, each.dtype) for each in message.autocast),
        values=tuple(_read_condition(each, len(message.leaves)) for each in message.values),
        ordered=tuple(message.ordered),
    )


def check_guards(message: pb.InputGuards, leaves: int, limits: Limits) -> None:
    """Raise Fault unless the guards are well-formed, one for each leaf, and only use sizes of these."""
    if len(message.leaves) != leaves:
        raise Fault(f"guards {len(message.leaves)} leaves, and the arguments have {leaves}")
    position = Position(limits=limits)
    for index, leaf in enumerate(message.leaves):
        _check_leaf(leaf, position)
        if leaf.tensor.HasField("same_as") and not 0 <= leaf.tensor.same_as < index:
            raise Fault(f"leaf {index} is to be the same as {leaf.tensor.same_as}, which does not come before it")
    for condition in message.conditions:
        _check_expression(condition, position)
    for mode in message.autocast:
        check_device(mode.device)
        _check_dtype(mode.dtype)
    if len(message.values) > _PARTS:
        raise Fault(f"has {len(message.values):,} conditions on values, and may have {_PARTS}")
    for asked in message.values:
        _check_condition(asked, leaves, limits)
    guards = read_guards(message)
    tensors = [leaf for leaf in guards.leaves if isinstance(leaf, TensorGuard)]
    sizes = [size for leaf in tensors for size in leaf.sizes]
    strides = [stride for leaf in tensors for stride in leaf.strides or ()]
    known = {size for size in sizes if isinstance(size, str)}
    for each in (*sizes, *strides, *guards.conditions, *(symbol for symbol, _, _ in guards.ranges)):
        if missing := symbols_of(each) - known:
            raise Fault(f"guards {min(missing)[:80]!r}, which is not the size of an argument")


def _read_leaf(message: pb.InputGuard, reader: ValueReader) -> Guard:
    if message.WhichOneof("kind") == "value":
        return ValueGuard(value=reader.read(message.value))
    tensor = message.tensor
    return TensorGuard(
        dtype=DTYPES[tensor.dtype],
        device=tensor.device,
        sizes=tuple(reader.read(size) for size in tensor.sizes),
        strides=None if tensor.contiguous else tuple(reader.read(stride) for stride in tensor.strides),
        requires_grad=tensor.requires_grad if tensor.HasField("requires_grad") else None,
        same_as=tensor.same_as if tensor.HasField("same_as") else None,
    )


def _check_leaf(message: pb.InputGuard, position: Position) -> None:
    kind = message.WhichOneof("kind")
    if kind == "value":
        if message.value.WhichOneof("kind") not in _VALUES:
            raise Fault("a guard holds a value that is not a number, flag, string or None")
        check_value(message.value, position)
    elif kind == "tensor":
        _check_dtype(message.tensor.dtype)
        check_device(message.tensor.device)
        if len(message.tensor.sizes) > position.limits.tensor_dims:
            raise Fault(f"a tensor of {len(message.tensor.sizes)} dimensions")
        if len(message.tensor.strides) != (0 if message.tensor.contiguous else len(message.tensor.sizes)):
            raise Fault(
                f"a tensor of {len(message.tensor.sizes)} dimensions with {len(message.tensor.strides)} strides"
            )
        for each in (*message.tensor.sizes, *message.tensor.strides):
            _check_expression(each, position)
    else:
        raise Fault("a guard is empty, or of a kind that this version does not know")


def _write_condition(message: pb.ValueCondition, asked: ValueCondition) -> None:
    writer = ValueWriter(special=_write_reference)
    message.answer, message.source = asked.answer, asked.source
    for step in asked.steps:
        each = message.steps.add(operator=step.operator)
        writer.write_all(each.args, step.args)
        for name, value in step.kwargs:
            writer.write(each.kwargs.add(name=name).value, value)


def _write_reference(value: pb.Value, data: object) -> bool:
    if not isinstance(data, Reference):
        return False
    value.node = data.index
    return True


def _read_condition(message: pb.ValueCondition, leaves: int) -> ValueCondition:
    references: Any = [Reference(index) for index in range(leaves + len(message.steps))]
    reader = ValueReader(references)
    steps = tuple(
        Step(
            operator=each.operator,
            args=tuple(reader.read(value) for value in each.args),
            kwargs=tuple((every.name, reader.read(every.value)) for every in each.kwargs),
        )
        for each in message.steps
    )
    return ValueCondition(steps=steps, answer=message.answer, source=message.source)


def _check_condition(message: pb.ValueCondition, leaves: int, limits: Limits) -> None:
    check_text(message.source, limits)
    if not 0 < len(message.steps) <= MAX_STEPS:
        raise Fault(f"a condition on values has {len(message.steps):,} steps, and may have {MAX_STEPS}")
    for index, each in enumerate(message.steps):
        if each.operator not in OPERATORS:
            raise Fault(f"a condition on values uses {each.operator[:80]!r}, which is not allowed there")
        position = Position(limits=limits, nodes=leaves + index)
        for value in each.args:
            check_value(value, position)
        for every in each.kwargs:
            check_name(every.name, "keyword argument")
            check_value(every.value, position)
        if "::" in each.operator:
            check_operator(each.operator)
            check_arguments(rules_of(each.operator), each.operator, each)


def _check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise Fault(f"unknown dtype {name[:80]!r}")


def _check_expression(message: pb.Value, position: Position) -> None:
    """Raise Fault unless the value is an expression that can be evaluated."""
    check_value(message, position)
    if (parts := _check_parts(message)) > _PARTS:
        raise Fault(f"an expression has {parts:,} parts, and may have {_PARTS}")


def _check_parts(message: pb.Value) -> int:
    """Raise Fault unless the value is an expression, and return how many parts it has."""
    kind = message.WhichOneof("kind")
    if kind == "text":
        check_name(message.text, "symbol")
    elif kind == "tuple":
        operation, *parts = message.tuple.items or [pb.Value()]
        if operation.text not in OPERATIONS or not parts or len(parts) != _ARITY.get(operation.text, len(parts)):
            raise Fault(f"an expression has the operation {operation.text[:80]!r} with {len(parts)} parts")
        return 1 + sum(map(_check_parts, parts))
    elif kind not in ("integer", "boolean"):
        raise Fault(f"an expression holds a {kind}")
    return 1
