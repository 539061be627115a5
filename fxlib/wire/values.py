"""Writes values to the wire format and reads them: arguments of nodes, attributes of modules, other immediate values.

Values that are read have passed `check_values`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.passes.shape_prop import TensorMetadata

from fxlib.utils.pytree import python_number
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.check_values import Position, check_value
from fxlib.wire.faults import DEFAULT, Fault, excess
from fxlib.wire.names import DTYPES, LAYOUTS, MEMORY_FORMATS, QSCHEMES, check_text
from fxlib.wire.opaque import OpaqueAttribute, OpaqueRRef, opaque_tuple, tuple_label
from fxlib.wire.targets import find_operator, functions, operator_name

Plain = Callable[[pb.Value, Any], None]
Nested = Callable[[pb.Value, Any, "ValueWriter"], None]
Special = Callable[[pb.Value, object], bool]
_INT64 = range(-(1 << 63), 1 << 63)


class ValueWriter:
    """Writes values into messages.

    Args:
        nodes: the index of each node that a value may refer to.
        special: writes a value that is not immediate, and returns whether it did.
    """

    def __init__(self, nodes: Mapping[Node, int] | None = None, special: Special | None = None) -> None:
        self.nodes = {} if nodes is None else nodes
        self._special = special
        self._depth = 0

    def write(self, value: pb.Value, data: object) -> None:
        """Write `data` into an empty message.

        Raises:
            Fault: the value cannot travel.
        """
        kind = type(data)
        if kind is Node:
            self._write_node(value, data)
        elif (plain := _PLAIN_WRITERS.get(kind)) is not None:
            plain(value, data)
        elif (nested := _NESTED_WRITERS.get(kind)) is not None:
            nested(value, data, self)
        elif self._special is not None and self._special(value, data):
            return
        elif isinstance(data, tuple) and hasattr(data, "_fields"):
            _named_tuple(value, data, self)
        elif (number := python_number(data)) is not None:
            self.write(value, number)
        else:
            raise _refusal(data)

    def write_all(self, values: Any, items: Iterable[object]) -> None:
        """Append to a repeated field, one container deeper."""
        self._enter()
        for item in items:
            self.write(values.add(), item)
        self._depth -= 1

    def write_entries(self, entries: pb.Entries, items: Mapping[Any, object]) -> None:
        """Write the entries of a dict, in order."""
        entries.SetInParent()
        self._enter()
        immediate = ValueWriter()
        for key, item in items.items():
            entry = entries.items.add()
            immediate.write(entry.key, key)
            self.write(entry.value, item)
        self._depth -= 1

    def _write_node(self, value: pb.Value, node: Any) -> None:
        index = self.nodes.get(node)
        if index is None:
            raise Fault(
                f"refers to {node.name!r}, which is not an earlier node", "Run graph.lint(), and sort the nodes."
            )
        value.node = index

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEFAULT.nesting:
            raise excess("nesting of a value", self._depth, DEFAULT.nesting, "nesting")


def encode_value(data: object) -> pb.Value:
    """Return an immediate value (no node, tensor or function in it) as a message.

    Raises:
        WireError: the value cannot travel.
    """
    value = pb.Value()
    try:
        ValueWriter().write(value, data)
    except Fault as fault:
        raise fault.at("value") from None
    return value


def _refusal(data: object) -> Fault:
    name = f"{type(data).__module__}.{type(data).__qualname__}"
    if isinstance(data, torch.Tensor):
        hint = "Hold it in a buffer or attribute, and read it with a get_attr node."
    elif callable(data):
        hint = "A function or class cannot be an argument in generated code either: call it in a node of its own."
    elif isinstance(data, (int, float, str)):
        hint = f"Convert it to a plain {next(cls for cls in (int, float, str) if isinstance(data, cls)).__name__}."
    else:
        hint = "Arguments are immediate values, nodes, and containers of them."
    return Fault(f"a {name} cannot travel", hint)


def _integer(value: pb.Value, data: int) -> None:
    if data in _INT64:
        value.integer = data
    elif data.bit_length() > DEFAULT.integer_bits:
        raise excess("bits of an integer", data.bit_length(), DEFAULT.integer_bits, "integer_bits")
    else:
        value.big_integer = data.to_bytes(data.bit_length() // 8 + 1, "little", signed=True)


def _text(value: pb.Value, data: str) -> None:
    check_text(data, DEFAULT)
    try:
        value.text = data
    except UnicodeEncodeError:
        raise Fault("a string holds a lone surrogate, which UTF-8 cannot encode") from None


def _range(value: pb.Value, data: range) -> None:
    if not all(part in _INT64 for part in (data.start, data.stop, data.step)):
        raise Fault("a range exceeds 64 bits")
    value.range.start, value.range.stop, value.range.step = data.start, data.stop, data.step


def _complex(value: pb.Value, data: complex) -> None:
    value.complex.SetInParent()
    value.complex.real, value.complex.imag = data.real, data.imag


def _size(value: pb.Value, data: torch.Size) -> None:
    value.size.SetInParent()
    value.size.sizes.extend(data)


def _operator(value: pb.Value, data: OpOverload) -> None:
    name = operator_name(data)
    if name is None:
        raise Fault(f"operator {data.name()!r} is not on the allow-list of torch.ops")
    value.operator = name


def _field(name: str) -> Plain:
    return lambda value, data: setattr(value, name, data)


def _marker(name: str) -> Plain:
    return lambda value, _: setattr(value, name, True)


def _constant(name: str) -> Plain:
    return lambda value, data: setattr(value, name, str(data).removeprefix("torch."))


def _slice(value: pb.Value, data: slice, writer: ValueWriter) -> None:
    value.slice.SetInParent()
    writer._enter()
    for field, part in ((value.slice.start, data.start), (value.slice.stop, data.stop), (value.slice.step, data.step)):
        writer.write(field, part)
    writer._depth -= 1


def _sequence(name: str) -> Nested:
    def write(value: pb.Value, data: Iterable[object], writer: ValueWriter) -> None:
        values: pb.Values = getattr(value, name)
        values.SetInParent()
        writer.write_all(values.items, data)

    return write


def _entries(name: str) -> Nested:
    return lambda value, data, writer: writer.write_entries(getattr(value, name), data)


def _named_tuple(value: pb.Value, data: Any, writer: ValueWriter) -> None:
    value.named_tuple.name = tuple_label(type(data))
    value.named_tuple.fields.extend(data._fields)
    writer.write_all(value.named_tuple.items, data)


def write_tensor_meta(value: pb.Value, data: object) -> bool:
    """Write the facts that shape propagation found about a tensor; return False if `data` is something else.

    Raises:
        Fault: the value holds a symbolic shape, or quantization parameters that are not immediate values.
    """
    if not isinstance(data, TensorMetadata):
        return False
    meta = value.tensor_meta
    sizes = (*data.shape, *data.stride)
    if not all(type(size) is int for size in sizes):
        raise Fault("a symbolic shape cannot travel")
    meta.shape.extend(data.shape)
    meta.stride.extend(data.stride)
    meta.dtype = str(data.dtype).removeprefix("torch.")
    meta.requires_grad, meta.is_quantized = data.requires_grad, data.is_quantized
    meta.memory_format = "" if data.memory_format is None else str(data.memory_format).removeprefix("torch.")
    if data.qparams:
        ValueWriter().write(meta.qparams, data.qparams)
    return True


_PLAIN_WRITERS: dict[type, Plain] = {
    int: _integer,
    float: _field("real"),
    bool: _field("boolean"),
    str: _text,
    type(None): _marker("none"),
    type(...): _marker("ellipsis"),
    range: _range,
    complex: _complex,
    torch.dtype: _constant("dtype"),
    torch.layout: _constant("layout"),
    torch.memory_format: _constant("memory_format"),
    torch.qscheme: _constant("qscheme"),
    torch.device: _constant("device"),
    torch.Size: _size,
    OpOverload: _operator,
}
_NESTED_WRITERS: dict[type, Nested] = {
    immutable_list: _sequence("list"),
    list: _sequence("list"),
    tuple: _sequence("tuple"),
    immutable_dict: _entries("dict"),
    dict: _entries("dict"),
    OrderedDict: _entries("ordered_dict"),
    slice: _slice,
}


class ValueReader:
    """Builds the values that checked messages describe.

    Args:
        nodes: the nodes that values may refer to, by index.
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
        """Return a reader for the arguments of one graph."""
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
        plain = _PLAIN_READERS.get(str(kind))
        return plain(data) if plain is not None else _NESTED_READERS[str(kind)](data, self)

    def tuple_class(self, label: str, fields: tuple[str, ...]) -> Any:
        """Return the client's class with this label, or one that stands for it."""
        cls: Any = self._tuples.get(label)
        if cls is None:
            cls = self._tuples[label] = opaque_tuple(label, fields)
        if cls._fields != fields:
            raise Fault(f"{label} has the fields {', '.join(cls._fields)}")
        return cls


def decode_value(value: pb.Value) -> Any:
    """Return an immediate value (no node, tensor or function in it) from a received message.

    Raises:
        WireError: the message is malformed, or larger than the default limits allow.
    """
    try:
        check_value(value, Position(limits=DEFAULT))
        return ValueReader().read(value)
    except Fault as fault:
        raise fault.at("value") from None


def _read_entries(entries: pb.Entries, reader: ValueReader) -> dict[Any, Any]:
    result = {reader.read(entry.key): reader.read(entry.value) for entry in entries.items}
    if len(result) != len(entries.items):
        raise Fault("a dict holds one key twice")
    return result


def _read_named_tuple(value: pb.NamedTuple, reader: ValueReader) -> Any:
    return reader.tuple_class(value.name, tuple(value.fields))(*map(reader.read, value.items))


def _read_tensor(index: int, reader: ValueReader) -> torch.Tensor:
    if reader.tensors is None:
        raise Fault("a tensor may not stand here")
    return reader.tensors(index)


def _read_tensor_meta(meta: pb.TensorMeta, reader: ValueReader) -> TensorMetadata:
    return TensorMetadata(
        shape=torch.Size(meta.shape),
        dtype=DTYPES[meta.dtype],
        requires_grad=meta.requires_grad,
        stride=tuple(meta.stride),
        memory_format=MEMORY_FORMATS.get(meta.memory_format),
        is_quantized=meta.is_quantized,
        qparams=reader.read(meta.qparams) if meta.HasField("qparams") else {},
    )


_AS_IT_IS = frozenset({"integer", "real", "boolean", "text"})
_PLAIN_READERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "ellipsis": lambda _: ...,
    "big_integer": lambda data: int.from_bytes(data, "little", signed=True),
    "complex": lambda data: complex(data.real, data.imag),
    "range": lambda data: range(data.start, data.stop, data.step),
    "dtype": DTYPES.__getitem__,
    "layout": LAYOUTS.__getitem__,
    "memory_format": MEMORY_FORMATS.__getitem__,
    "qscheme": QSCHEMES.__getitem__,
    "device": torch.device,
    "size": lambda data: torch.Size(data.sizes),
    "operator": find_operator,
    "function": functions().__getitem__,
    "opaque": OpaqueAttribute,
    "handle": lambda data: OpaqueRRef(data.slot, data.owner, here=data.here),
}
_NESTED_READERS: dict[str, Callable[[Any, ValueReader], Any]] = {
    "list": lambda data, reader: [reader.read(item) for item in data.items],
    "tuple": lambda data, reader: tuple([reader.read(item) for item in data.items]),
    "dict": _read_entries,
    "ordered_dict": lambda data, reader: OrderedDict(_read_entries(data, reader)),
    "slice": lambda data, reader: slice(reader.read(data.start), reader.read(data.stop), reader.read(data.step)),
    "named_tuple": _read_named_tuple,
    "tensor_meta": _read_tensor_meta,
    "tensor": _read_tensor,
}
