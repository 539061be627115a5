"""How a forward packs arguments and results: the nests that torch.utils._pytree flattens, containers of any class.

The class of a container stays with the client. Where there is no client, one stands in for it, with the same parts.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import nn
from torch.utils._pytree import TreeSpec

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.callables import bodies, label_of, specs_of
from fxlib.wire.faults import Fault
from fxlib.wire.opaque import OpaqueContainer, opaque_container, tuple_label
from fxlib.wire.read_values import ValueReader
from fxlib.wire.write_values import ValueWriter

_NAMED: Any = namedtuple  # noqa: PYI024 - what pytree files all of these classes under
_SEQUENCES: dict[Any, str] = {list: "list", tuple: "tuple"}
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered_dict"}


def write_spec(value: pb.Value, spec: TreeSpec) -> None:
    """Write a structure into an empty message.

    Raises:
        Fault: it cannot travel.
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
        value.container.name = container_label(spec.type)
        ValueWriter().write(value.container.context, spec.context)
        _write_all(value.container.items, spec)


def read_spec(value: pb.Value, reader: ValueReader, classes: Mapping[str, type]) -> TreeSpec:
    """Return the structure that a checked message describes; `classes` are the client's own, by label.

    Raises:
        Fault: it contradicts itself.
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
        return TreeSpec(classes.get(data.name) or opaque_container(data.name), reader.read(data.context), children)
    return TreeSpec(list if kind == "list" else tuple, None, children)


def container_classes(root: nn.Module) -> dict[str, type]:
    """Return the classes of containers in the arguments and results of the graphs of a module tree, by label."""
    found: dict[str, type] = {}
    for body in bodies(root):
        for spec in specs_of(body):
            found.update(_containers(spec))
    return found


def _containers(spec: TreeSpec) -> Iterator[tuple[str, type]]:
    if not spec.is_leaf() and spec.type not in (*_SEQUENCES, *_MAPPINGS, _NAMED):
        yield container_label(spec.type), spec.type
    for child in spec.children():
        yield from _containers(child)


def container_label(cls: type) -> str:
    """Return the label of a class of containers."""
    return cls.label if issubclass(cls, OpaqueContainer) else label_of(cls)


def _write_all(items: Any, spec: TreeSpec) -> None:
    for child in spec.children():
        write_spec(items.add(), child)
