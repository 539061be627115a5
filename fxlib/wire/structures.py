"""How a forward packs arguments and results: the nests that torch.utils._pytree flattens, containers of any class.

The class of a container stays with the client. Where there is no client, one stands in for it, with the same parts.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch.utils._pytree as pytree
from torch import nn
from torch.utils._pytree import TreeSpec

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.callables import bodies, label_of, specs_of
from fxlib.wire.faults import Fault
from fxlib.wire.opaque import OpaqueContainer, tuple_label
from fxlib.wire.read_values import ValueReader
from fxlib.wire.write_values import ValueWriter

_NAMED: Any = namedtuple  # noqa: PYI024 - what pytree files all of these classes under
_SEQUENCES: dict[Any, str] = {list: "list", tuple: "tuple"}
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered_dict"}


class OwnContainer(NamedTuple):
    """A class of containers of the client's, and what its graphs say of such containers besides their parts."""

    cls: type
    contexts: set[bytes]


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
        value.container.name, context = container_facts(spec.type, spec.context)
        ValueWriter().write(value.container.context, context)
        _write_all(value.container.items, spec)


def read_spec(value: pb.Value, reader: ValueReader, classes: Mapping[str, OwnContainer] | None) -> TreeSpec:
    """Return the structure that a checked message describes.

    Args:
        value: the message.
        reader: reads the keys of dicts and what containers say besides their parts.
        classes: the client's own classes, by label, which alone may then be named; None where there is no client.

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
        context = reader.read(data.context)
        own = OwnContainer(OpaqueContainer, set()) if classes is None else classes.get(data.name)
        # The class's own code would make objects of what the message says.
        if own is None or (classes is not None and _bytes(data.context) not in own.contexts):
            raise Fault(f"a container of the class {data.name!r} is not described as in the client's own graphs")
        return TreeSpec(own.cls, (data.name, context) if own.cls is OpaqueContainer else context, children)
    return TreeSpec(list if kind == "list" else tuple, None, children)


def container_classes(root: nn.Module) -> dict[str, OwnContainer]:
    """Return the classes of containers in the arguments and results of the graphs of a module tree, by label."""
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
    """Return the label of a class of containers, and what is said of such a container besides its parts."""
    return context if cls is OpaqueContainer else (label_of(cls), context)


def _write_all(items: Any, spec: TreeSpec) -> None:
    for child in spec.children():
        write_spec(items.add(), child)
