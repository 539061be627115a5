"""Checks of received values: structure, ranges and names, without building what they describe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from fxlib.spec.servers import is_worker_name
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.faults import Fault, Limits, excess
from fxlib.wire.names import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    QSCHEMES,
    check_device,
    check_label,
    check_name,
    check_text,
)
from fxlib.wire.targets import check_operator

_STRUCTURE = frozenset({"none", "list", "tuple", "dict", "ordered_dict", "named_tuple", "container"})
_OF_CONTAINERS = frozenset({"structure", "result"})
_ASKED_OF_RREFS = frozenset({"is_owner", "owner", "owner_name", "to_here", "wait"})
"""Attributes that the operators of `fxlib.runtime` use on whatever they are given."""
_POSITIONS: dict[str, tuple[str, ...]] = {
    "tensor_meta": ("tensor_meta",),
    "function": ("attribute",),
    "tensor": ("attribute", "input"),
    "opaque": ("attribute",),
    "handle": ("attribute",),
    "container": ("structure", "input"),
    "record": ("input",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The values allowed in a position: arguments may refer to earlier nodes, attributes to tensors."""

    limits: Limits
    kind: str = "immediate"
    """"immediate", "attribute", "tensor_meta"; "input" of a step; "structure": containers, with None for each leaf;
    "result" of a remote function: the same, but only with Python's own containers."""
    nodes: int = 0
    """Number of nodes that the value may refer to: those with a lower index."""
    tensors: int = 0
    """Number of tensors that the value may refer to."""
    functions: Collection[str] = ()
    """Functions that the value may be."""
    withheld: Collection[int] = ()
    """Earlier nodes whose values may not be used here: modules and functions."""


def check_value(value: pb.Value, position: Position, depth: int = 0) -> None:
    """Raise Fault unless the value is well-formed and allowed in this position."""
    kind = value.WhichOneof("kind")
    if position.kind in _OF_CONTAINERS and kind not in _STRUCTURE:
        raise Fault(f"a {kind} stands where a structure has containers, and None for each leaf")
    if kind == "node":
        if value.node >= position.nodes:
            raise Fault(f"refers to node {value.node}, which does not come before it")
        if value.node in position.withheld:
            raise Fault(f"refers to node {value.node}, a module or function, which may not be used here")
    elif kind in _FREE:
        return
    elif kind is None:
        raise Fault("is empty, or of a kind that this version does not know")
    elif position.kind not in _POSITIONS.get(kind, (position.kind,)):
        raise Fault(f"a {kind} may not stand here")
    elif kind in _NAMES:
        if (name := getattr(value, kind)) not in _NAMES[kind]:
            raise Fault(f"unknown {kind} {name[:80]!r}")
        if kind == "layout" and name != "strided":
            raise Fault(f"layout {name} may not travel: such a tensor holds indices that torch's operators trust")
    elif kind in _PLAIN:
        _PLAIN[kind](getattr(value, kind), position)
    else:
        _NESTED[kind](getattr(value, kind), position, depth)


def check_sizes(sizes: Iterable[int], limits: Limits) -> int:
    """Raise Fault unless the sizes are those of a tensor within the limits; return the number of elements."""
    elements = 1
    for dims, size in enumerate(sizes, start=1):
        if dims > limits.tensor_dims:
            raise excess("dimensions of a tensor", dims, limits.tensor_dims, "tensor_dims")
        if size < 0:
            raise Fault(f"negative size {size}")
        elements *= size
        if elements > limits.tensor_elements:
            raise excess("elements of a tensor", elements, limits.tensor_elements, "tensor_elements")
    return elements


def _deeper(position: Position, depth: int) -> int:
    if depth >= position.limits.nesting:
        raise excess("nesting of a value", depth + 1, position.limits.nesting, "nesting")
    return depth + 1


def _values(values: pb.Values, position: Position, depth: int) -> None:
    depth = _deeper(position, depth)
    for item in values.items:
        check_value(item, position, depth)


def _entries(entries: pb.Entries, position: Position, depth: int) -> None:
    depth = _deeper(position, depth)
    for entry in entries.items:
        _key(entry.key, position.limits, depth)
        check_value(entry.value, position, depth)


def _key(key: pb.Value, limits: Limits, depth: int) -> None:
    kind = key.WhichOneof("kind")
    if kind in {"node", "list", "dict", "ordered_dict", "slice"}:
        raise Fault(f"a {kind} cannot be the key of a dict")
    if kind in {"tuple", "named_tuple"}:
        depth = _deeper(Position(limits=limits), depth)
        for item in getattr(key, kind).items:
            _key(item, limits, depth)
    check_value(key, Position(limits=limits), depth)


def _slice(value: pb.Slice, position: Position, depth: int) -> None:
    depth = _deeper(position, depth)
    for part in (value.start, value.stop, value.step):
        check_value(part, position, depth)


def _range(value: pb.Range, _: Position) -> None:
    if value.step == 0:
        raise Fault("a range has step 0")


def _integer(data: bytes, position: Position) -> None:
    if len(data) * 8 > position.limits.integer_bits + 8:
        raise excess("bits of an integer", len(data) * 8, position.limits.integer_bits, "integer_bits")


def _size(shape: pb.Shape, position: Position) -> None:
    check_sizes(shape.sizes, position.limits)


def _tensor(index: int, position: Position) -> None:
    if index >= position.tensors:
        raise Fault(f"refers to tensor {index}, of {position.tensors}")


def _function(name: str, position: Position) -> None:
    if name not in position.functions:
        raise Fault(f"function {name[:80]!r} may not stand here")


def _handle(handle: pb.Handle, _: Position) -> None:
    check_label(handle.slot)
    if handle.owner and not is_worker_name(handle.owner):
        raise Fault(f"{handle.owner[:80]!r} is not the name of a worker")


def _named_tuple(value: pb.NamedTuple, position: Position, depth: int) -> None:
    check_label(value.name)
    check_name(value.name.rpartition(".")[2], "class")
    if len(value.fields) != len(value.items) or len(set(value.fields)) != len(value.fields):
        raise Fault("a named tuple or record has a different number of fields and items, or two fields of one name")
    for name in value.fields:
        check_name(name, "field")
        if name.startswith("_") or name in _ASKED_OF_RREFS:
            raise Fault(f"field {name!r} begins with an underscore, or is a method of RRefs")
    depth = _deeper(position, depth)
    for item in value.items:
        check_value(item, position, depth)


def _container(value: pb.Container, position: Position, depth: int) -> None:
    check_label(value.name)
    depth = _deeper(position, depth)
    check_value(value.context, Position(limits=position.limits), depth)
    for item in value.items:
        check_value(item, position, depth)


def _tensor_meta(meta: pb.TensorMeta, position: Position, depth: int) -> None:
    check_sizes(meta.shape, position.limits)
    if len(meta.stride) not in (0, len(meta.shape)):
        raise Fault("strides do not match the shape")
    if meta.dtype not in DTYPES or meta.memory_format not in {"", *MEMORY_FORMATS}:
        raise Fault(f"unknown dtype {meta.dtype[:80]!r} or memory format {meta.memory_format[:80]!r}")
    if meta.HasField("qparams"):
        if meta.qparams.WhichOneof("kind") != "dict":
            raise Fault("qparams is not a dict")
        check_value(meta.qparams, Position(limits=position.limits), depth)


_FREE = frozenset({"none", "boolean", "integer", "real", "complex", "ellipsis"})
_NAMES: dict[str, Collection[str]] = {
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "memory_format": MEMORY_FORMATS,
    "qscheme": QSCHEMES,
}
_PLAIN: dict[str, Callable[[Any, Position], None]] = {
    "text": lambda text, position: check_text(text, position.limits),
    "big_integer": _integer,
    "range": _range,
    "device": lambda name, _: check_device(name),
    "size": _size,
    "operator": lambda name, _: check_operator(name),
    "tensor": _tensor,
    "function": _function,
    "opaque": lambda label, _: check_label(label),
    "handle": _handle,
}
_NESTED: dict[str, Callable[[Any, Position, int], None]] = {
    "list": _values,
    "tuple": _values,
    "dict": _entries,
    "ordered_dict": _entries,
    "slice": _slice,
    "named_tuple": _named_tuple,
    "record": _named_tuple,
    "container": _container,
    "tensor_meta": _tensor_meta,
}
