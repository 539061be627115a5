"""Values out of the wire format, once `check_values` has passed them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.passes.shape_prop import TensorMetadata

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import constants
from fxlib.wire.check_values import Place, check_value
from fxlib.wire.faults import Fault
from fxlib.wire.limits import DEFAULT
from fxlib.wire.opaque import OpaqueAttribute, OpaqueRRef, opaque_tuple
from fxlib.wire.operators import find_operator
from fxlib.wire.targets import functions


class ValueReader:
    """Builds what checked values describe.

    Args:
        nodes: nodes that values may refer to, by index.
        tensors: returns the tensor of an index.
        tuples: the client's named tuple classes, by label.
    """

    def __init__(
        self,
        nodes: Sequence[Node] = (),
        tensors: Callable[[int], torch.Tensor] | None = None,
        tuples: Mapping[str, type] | None = None,
    ) -> None:
        self.nodes = nodes
        self.tensors = tensors
        self._tuples: dict[str, type] = dict(tuples or {})

    def with_nodes(self, nodes: Sequence[Node]) -> ValueReader:
        """Return a reader of arguments of one graph."""
        return ValueReader(nodes, self.tensors, self._tuples)

    def read(self, value: pb.Value) -> Any:
        """Return the value.

        Raises:
            Fault: the value contradicts itself.
        """
        kind = value.WhichOneof("kind")
        if kind == "node":
            return self.nodes[value.node]
        data = getattr(value, str(kind))
        if kind in _AS_IT_IS:
            return data
        plain = _PLAIN.get(str(kind))
        return plain(data) if plain is not None else _NESTED[str(kind)](data, self)

    def tuple_class(self, label: str, fields: tuple[str, ...]) -> Any:
        """Return the client's class of this label, or one that stands for it."""
        cls: Any = self._tuples.get(label)
        if cls is None:
            cls = self._tuples[label] = opaque_tuple(label, fields)
        if cls._fields != fields:
            raise Fault(f"{label} has the fields {', '.join(cls._fields)}")
        return cls


def decode_value(value: pb.Value) -> Any:
    """Return an immediate value (no node, tensor or function in it) from a received message.

    Raises:
        WireError: it is malformed, or larger than the default limits allow.
    """
    try:
        check_value(value, Place(limits=DEFAULT))
        return ValueReader().read(value)
    except Fault as fault:
        raise fault.at("value") from None


def _entries(entries: pb.Entries, reader: ValueReader) -> dict[Any, Any]:
    result = {reader.read(entry.key): reader.read(entry.value) for entry in entries.items}
    if len(result) != len(entries.items):
        raise Fault("a dict holds one key twice")
    return result


def _named_tuple(value: pb.NamedTuple, reader: ValueReader) -> Any:
    return reader.tuple_class(value.name, tuple(value.fields))(*map(reader.read, value.items))


def _tensor(index: int, reader: ValueReader) -> torch.Tensor:
    if reader.tensors is None:
        raise Fault("a tensor may not stand here")
    return reader.tensors(index)


def _tensor_meta(meta: pb.TensorMeta, reader: ValueReader) -> TensorMetadata:
    return TensorMetadata(
        shape=torch.Size(meta.shape),
        dtype=constants.DTYPES[meta.dtype],
        requires_grad=meta.requires_grad,
        stride=tuple(meta.stride),
        memory_format=constants.MEMORY_FORMATS.get(meta.memory_format),
        is_quantized=meta.is_quantized,
        qparams=reader.read(meta.qparams) if meta.HasField("qparams") else {},
    )


_AS_IT_IS = frozenset({"integer", "real", "boolean", "text"})
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "ellipsis": lambda _: ...,
    "big_integer": lambda data: int.from_bytes(data, "little", signed=True),
    "complex": lambda data: complex(data.real, data.imag),
    "range": lambda data: range(data.start, data.stop, data.step),
    "dtype": constants.DTYPES.__getitem__,
    "layout": constants.LAYOUTS.__getitem__,
    "memory_format": constants.MEMORY_FORMATS.__getitem__,
    "qscheme": constants.QSCHEMES.__getitem__,
    "device": torch.device,
    "size": lambda data: torch.Size(data.sizes),
    "operator": find_operator,
    "function": functions().__getitem__,
    "opaque": OpaqueAttribute,
    "handle": lambda data: OpaqueRRef(data.slot, data.owner, here=data.here),
}
_NESTED: dict[str, Callable[[Any, ValueReader], Any]] = {
    "list": lambda data, reader: [reader.read(item) for item in data.items],
    "tuple": lambda data, reader: tuple([reader.read(item) for item in data.items]),
    "dict": _entries,
    "ordered_dict": lambda data, reader: OrderedDict(_entries(data, reader)),
    "slice": lambda data, reader: slice(reader.read(data.start), reader.read(data.stop), reader.read(data.step)),
    "named_tuple": _named_tuple,
    "tensor_meta": _tensor_meta,
    "tensor": _tensor,
}
