"""Nested containers in the wire format: what a forward takes and returns, and the inputs of a step.

A forward's containers are those that torch.utils._pytree flattens. The inputs of a step are nested containers of values
and tensors, which travel beside them.

The class of a container stays with the client. Named tuples, dataclasses and other containers travel as their parts and
their names; a reader that lacks the classes makes its own, which hold no code of the client's.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from fxlib.spec.inputs import MAX_VALUES, Tensors
from fxlib.utils.pytree import is_open, is_registered
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.callables import bodies, label_of, specs_of
from fxlib.wire.check_values import Position, check_value
from fxlib.wire.faults import DEFAULT, Fault
from fxlib.wire.opaque import OpaqueContainer, opaque_record, tuple_label
from fxlib.wire.values import ValueReader, ValueWriter

_NAMED: Any = namedtuple  # noqa: PYI024 - what pytree files all of these classes under
_SEQUENCES: dict[Any, str] = {list: "list", tuple: "tuple"}
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered_dict"}


class OwnContainer(NamedTuple):
    """A container class of the client's, and what its graphs record of such containers besides their parts."""

    cls: type
    contexts: set[bytes]


def write_spec(value: pb.Value, spec: TreeSpec) -> None:
    """Write a structure into an empty message.

    Raises:
        Fault: the structure cannot travel.
    """
    if spec.is_leaf():
        value.none = True
    elif spec.type in _SEQUENCES:
        parts: pb.Values = getattr(value, _SEQUENCES[spec.type])
        parts.SetInParent()
        _write_all(parts.items, spec)
    elif spec.type in _MAPPINGS:
        entries: pb.Entries = getattr(value, _MAPPINGS[spec.type])
        entries.SetInParent()
        for key, child in zip(spec.context, spec.children(), strict=True):
            entry = entries.items.add()
            ValueWriter().write(entry.key, key)
            write_spec(entry.value, child)
    elif spec.type is _NAMED:
        value.named_tuple.name = tuple_label(spec.context)
        value.named_tuple.fields.extend(spec.context._fields)
        _write_all(value.named_tuple.items, spec)
    else:
        value.container.name, context = container_facts(spec.type, spec.context)
        ValueWriter().write(value.container.context, context)
        _write_all(value.container.items, spec)


def read_spec(value: pb.Value, reader: ValueReader, classes: Mapping[str, OwnContainer] | None) -> TreeSpec:
    """Return the structure that a checked message describes.

    Args:
        value: the message.
        reader: reads the keys of dicts and the data of containers besides their parts.
        classes: the client's own classes, by label, which alone may then be named; None if there is no client.

    Raises:
        Fault: the structure contradicts itself.
    """
    kind = str(value.WhichOneof("kind"))
    data = getattr(value, kind)
    if kind == "none":
        return pytree.treespec_leaf()
    if kind in _MAPPINGS.values():
        cls: Any = dict if kind == "dict" else OrderedDict
        keys = [reader.read(entry.key) for entry in data.items]
        if len(set(keys)) != len(keys):
            raise Fault("a dict holds one key twice")
        return TreeSpec(cls, keys, [read_spec(entry.value, reader, classes) for entry in data.items])
    children = [read_spec(item, reader, classes) for item in data.items]
    if kind == "named_tuple":
        return TreeSpec(_NAMED, reader.tuple_class(data.name, tuple(data.fields)), children)
    if kind == "container":
        context = reader.read(data.context)
        own = OwnContainer(OpaqueContainer, set()) if classes is None else classes.get(data.name)
        # The class's own code would make objects of what the message says.
        if own is None or (classes is not None and _bytes(data.context) not in own.contexts):
            raise Fault(f"a container of the class {data.name!r} is not described as in the client's own graphs")
        return TreeSpec(own.cls, (data.name, context) if own.cls is OpaqueContainer else context, children)
    return TreeSpec(list if kind == "list" else tuple, None, children)


def container_classes(root: nn.Module) -> dict[str, OwnContainer]:
    """Return the container classes in the arguments and results of a module tree's graphs, by label."""
    found: dict[str, OwnContainer] = {}
    for body in bodies(root):
        for spec in (each for whole in specs_of(body) for each in _containers(whole)):
            label, said = container_facts(spec.type, spec.context)
            context = pb.Value()
            ValueWriter().write(context, said)
            found.setdefault(label, OwnContainer(spec.type, set())).contexts.add(_bytes(context))
    return found


def _bytes(context: pb.Value) -> bytes:
    return context.SerializeToString(deterministic=True)


def _containers(spec: TreeSpec) -> Iterator[TreeSpec]:
    if not spec.is_leaf() and spec.type not in (*_SEQUENCES, *_MAPPINGS, _NAMED):
        yield spec
    for child in spec.children():
        yield from _containers(child)


def container_facts(cls: type, context: Any) -> tuple[str, Any]:
    """Return the label of a container class, and the data of such a container besides its parts."""
    return context if cls is OpaqueContainer else (label_of(cls), context)


def _write_all(items: Any, spec: TreeSpec) -> None:
    for child in spec.children():
        write_spec(items.add(), child)


def write_nested(value: pb.Value, nested: object, where: str) -> list[Any]:
    """Write nested containers into an empty message; return their tensors, or descriptions of these, by index.

    Raises:
        WireError: a part cannot travel; `where` names the field.
    """
    found: list[Any] = []
    indices: dict[int, int] = {}

    def special(message: pb.Value, data: object) -> bool:
        if isinstance(data, (torch.Tensor, Tensors)):
            if id(data) not in indices or isinstance(data, Tensors):
                indices[id(data)] = len(found)
                found.append(data)
            message.tensor = indices[id(data)]
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
        writer.write(value, nested)
        _check_nested(value, len(found))
    except Fault as fault:
        raise fault.at(where) from None
    return found


def _check_nested(value: pb.Value, tensors: int) -> None:
    """Raise Fault unless received nested containers are well-formed, of bounded size, over so many tensors."""
    check_value(value, Position(limits=DEFAULT, kind="input", tensors=tensors))
    if (size := _size(value)) > MAX_VALUES:
        raise Fault(f"holds {size:,} values, and may hold {MAX_VALUES:,}")


def read_nested(value: pb.Value, tensors: Sequence[Any], where: str) -> Any:
    """Return the nested containers of a received message, over its tensors or their descriptions.

    Raises:
        WireError: the message is malformed, or larger than the limits allow; `where` names the field.
    """
    try:
        _check_nested(value, len(tensors))
        return _NestedReader(tensors=tensors.__getitem__).read(value)
    except Fault as fault:
        raise fault.at(where) from None


class _NestedReader(ValueReader):
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
    """Return how many containers and leaves checked nested containers have."""
    kind = str(value.WhichOneof("kind"))
    if kind in ("dict", "ordered_dict"):
        return 1 + sum(_size(each.value) for each in getattr(value, kind).items)
    if kind in ("list", "tuple", "named_tuple", "record", "container"):
        return 1 + sum(map(_size, getattr(value, kind).items))
    return 1
