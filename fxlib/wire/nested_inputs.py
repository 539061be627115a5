"""Inputs of a step into the wire format and back: nests of containers, values, and tensors, which travel beside them.

Named tuples, dataclasses and containers of classes that only the client has travel as their parts and their names; the
reader makes classes of its own for them, in which there is no code of the client's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxlib.spec.inputs import MAX_VALUES, Tensors
from fxlib.utils.pytree import is_open, is_registered
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.check_values import Place, check_value
from fxlib.wire.faults import Fault
from fxlib.wire.limits import DEFAULT
from fxlib.wire.opaque import OpaqueContainer, opaque_record, tuple_label
from fxlib.wire.read_values import ValueReader
from fxlib.wire.structures import container_facts
from fxlib.wire.write_values import ValueWriter


def write_nest(value: pb.Value, nest: object, where: str) -> list[Any]:
    """Write a nest into an empty message; return its tensors, or their descriptions, in the order of indices.

    Raises:
        WireError: it holds what cannot travel; `where` names the field.
    """
    found: list[Any] = []
    places: dict[int, int] = {}

    def special(message: pb.Value, data: object) -> bool:
        if isinstance(data, (torch.Tensor, Tensors)):
            if id(data) not in places or isinstance(data, Tensors):
                places[id(data)] = len(found)
                found.append(data)
            message.tensor = places[id(data)]
        elif is_registered(data):
            parts, context = pytree.SUPPORTED_NODES[type(data)].flatten_fn(data)
            message.container.name, context = container_facts(type(data), context)
            ValueWriter().write(message.container.context, context)
            writer.write_all(message.container.items, parts)
        elif is_open(data):
            names = [each.name for each in dataclasses.fields(data)]  # type: ignore[arg-type]
            message.record.name = tuple_label(type(data))
            message.record.fields.extend(names)
            writer.write_all(message.record.items, [getattr(data, name) for name in names])
        else:
            return False
        return True

    writer = ValueWriter(special=special)
    try:
        writer.write(value, nest)
        check_nest(value, len(found))
    except Fault as fault:
        raise fault.at(where) from None
    return found


def check_nest(value: pb.Value, tensors: int) -> None:
    """Raise Fault unless a received nest is well-formed, of a bounded size, over so many tensors."""
    check_value(value, Place(limits=DEFAULT, kind="input", tensors=tensors))
    if (size := _size(value)) > MAX_VALUES:
        raise Fault(f"holds {size:,} values, and may hold {MAX_VALUES:,}")


def read_nest(value: pb.Value, tensors: Sequence[Any], where: str) -> Any:
    """Return the nest of a received message, over its tensors or their descriptions.

    Raises:
        WireError: it is malformed, or larger than the limits allow; `where` names the field.
    """
    try:
        check_nest(value, len(tensors))
        return _NestReader(tensors=tensors.__getitem__).read(value)
    except Fault as fault:
        raise fault.at(where) from None


class _NestReader(ValueReader):
    def read(self, value: pb.Value) -> Any:
        """Return the value."""
        kind = value.WhichOneof("kind")
        if kind == "record":
            data = value.record
            return opaque_record(data.name, tuple(data.fields))(*map(self.read, data.items))
        if kind == "container":
            parts = [self.read(item) for item in value.container.items]
            return OpaqueContainer(value.container.name, parts, super().read(value.container.context))
        return super().read(value)


def _size(value: pb.Value) -> int:
    """Return how many containers and leaves a checked nest has."""
    kind = str(value.WhichOneof("kind"))
    if kind in ("dict", "ordered_dict"):
        return 1 + sum(_size(each.value) for each in getattr(value, kind).items)
    if kind in ("list", "tuple", "named_tuple", "record", "container"):
        return 1 + sum(map(_size, getattr(value, kind).items))
    return 1
