"""What remote calls returned, as profiles describe it, to and from protobuf."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from fxlib.protocol.converter import Converter, Rule
from fxlib.protocol.dtypes import DTYPE
from fxlib.protocol.values import read_value, write_value
from fxlib.spec.profile import Opaque, Result, TensorShape
from fxlib.v1 import graph_pb2, profile_pb2
from fxlib.wire.faults import Excess, Fault
from fxlib.wire.limits import DEFAULT

MAX_ELEMENTS = 1 << 32
"""Of one tensor of a reply."""


def _write(returned: Result) -> profile_pb2.Returned:
    """Write the structure of a result.

    Raises:
        Fault: a leaf that is no tensor cannot be written.
    """
    proto = profile_pb2.Returned()
    match returned:
        case TensorShape():
            proto.tensor.CopyFrom(_TENSOR.write(returned))
        case Opaque():
            proto.value.CopyFrom(write_value(returned.value))
        case tuple():
            proto.tuple.SetInParent()
            proto.tuple.items.extend(map(_write, returned))
        case list():
            proto.list.SetInParent()
            proto.list.items.extend(map(_write, returned))
        case dict():
            proto.fields.SetInParent()
            for name, each in returned.items():
                proto.fields.fields.add(name=name).value.CopyFrom(_write(each))
    return proto


def _read(proto: profile_pb2.Returned, depth: int = 0) -> Result:
    """Read the structure of a result.

    Raises:
        Fault: it is nested too deeply or of an unknown kind, a tensor in it is too large, or a leaf is none.
    """
    if depth > DEFAULT.nesting:
        raise Excess(f"is nested more than {DEFAULT.nesting} deep")

    def inner(each: profile_pb2.Returned) -> Result:
        return _read(each, depth + 1)

    match proto.WhichOneof("kind"):
        case "tensor":
            return _tensor(proto.tensor)
        case "value":
            return _leaf(proto.value)
        case "tuple":
            return tuple(map(inner, proto.tuple.items))
        case "list":
            return list(map(inner, proto.list.items))
        case "fields":
            return _fields(proto.fields.fields, inner)
        case _:
            raise Fault("of an unknown kind")


RETURNED = Rule(_write, _read)
"""The rule of a field that holds what a call returned."""

_TENSOR = Converter(TensorShape, profile_pb2.TensorShape, text=None, rules={"dtype": DTYPE})


def _tensor(proto: profile_pb2.TensorShape) -> TensorShape:
    if len(proto.shape) > DEFAULT.tensor_dims:
        raise Excess(f"{len(proto.shape)} dimensions exceed the limit of {DEFAULT.tensor_dims}")
    if any(size < 0 for size in proto.shape):
        raise Fault("a size is negative")
    if (elements := math.prod(proto.shape)) > MAX_ELEMENTS:
        raise Excess(f"{elements:,} elements exceed the limit of {MAX_ELEMENTS:,}")
    read = _TENSOR.read(proto)
    if read.requires_grad and not (read.dtype.is_floating_point or read.dtype.is_complex):
        raise Fault(f"a tensor of {proto.dtype} takes no gradient")
    return read


def _leaf(proto: graph_pb2.Value) -> Opaque:
    value = read_value(proto)
    if not (value is None or isinstance(value, (int, float, str))):
        raise Fault(f"a {type(value).__name__} is no leaf of a result")
    return Opaque(value=value)


def _fields(
    fields: Iterable[profile_pb2.ReturnedField], inner: Callable[[profile_pb2.Returned], Result]
) -> dict[str, Result]:
    read: dict[str, Result] = {}
    for each in fields:
        if each.name in read:
            raise Fault(f"two of its fields are called {each.name[:80]!r}")
        read[each.name] = inner(each.value)
    return read
