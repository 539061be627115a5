"""What remote calls returned, as profiles describe it, to and from protobuf."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from fxlib.errors import LimitError, WireError
from fxlib.protocol.dtypes import dtype_from_text, dtype_to_text
from fxlib.protocol.values import value_from_proto, value_to_proto
from fxlib.spec.profile import Opaque, Result, TensorShape
from fxlib.v1 import profile_pb2
from fxlib.wire.limits import DEFAULT

MAX_ELEMENTS = 1 << 32
"""Of one tensor of a reply."""


def returned_to_proto(returned: Result, where: str) -> profile_pb2.Returned:
    """Write the structure of a result.

    Raises:
        WireError: a leaf that is no tensor cannot be written; `where` names the field.
    """
    proto = profile_pb2.Returned()
    match returned:
        case TensorShape():
            proto.tensor.shape.extend(returned.shape)
            proto.tensor.dtype = dtype_to_text(returned.dtype)
            proto.tensor.requires_grad = returned.requires_grad
        case Opaque():
            proto.value.CopyFrom(value_to_proto(returned.value, where))
        case tuple():
            proto.tuple.SetInParent()
            proto.tuple.items.extend(returned_to_proto(each, where) for each in returned)
        case list():
            proto.list.SetInParent()
            proto.list.items.extend(returned_to_proto(each, where) for each in returned)
        case dict():
            proto.fields.SetInParent()
            for name, each in returned.items():
                proto.fields.fields.add(name=name).value.CopyFrom(returned_to_proto(each, where))
    return proto


def returned_from_proto(proto: profile_pb2.Returned, where: str, depth: int = 0) -> Result:
    """Read the structure of a result.

    Raises:
        LimitError: it is nested too deeply, or a tensor in it is too large.
        WireError: it is of an unknown kind, or a dtype, a size or a leaf is none; `where` names the field.
    """
    if depth > DEFAULT.nesting:
        raise LimitError(f"is nested more than {DEFAULT.nesting} deep", where=where)

    def inner(each: profile_pb2.Returned) -> Result:
        return returned_from_proto(each, where, depth + 1)

    match proto.WhichOneof("kind"):
        case "tensor":
            return _tensor(proto.tensor, where)
        case "value":
            return _leaf(proto, where)
        case "tuple":
            return tuple(map(inner, proto.tuple.items))
        case "list":
            return list(map(inner, proto.list.items))
        case "fields":
            return _fields(proto.fields.fields, inner, where)
        case _:
            raise WireError("of an unknown kind", where=where)


def _tensor(proto: profile_pb2.TensorShape, where: str) -> TensorShape:
    if len(proto.shape) > DEFAULT.tensor_dims:
        raise LimitError(f"{len(proto.shape)} dimensions exceed the limit of {DEFAULT.tensor_dims}", where=where)
    if any(size < 0 for size in proto.shape):
        raise WireError("a size is negative", where=where)
    if (elements := math.prod(proto.shape)) > MAX_ELEMENTS:
        raise LimitError(f"{elements:,} elements exceed the limit of {MAX_ELEMENTS:,}", where=where)
    dtype = dtype_from_text(proto.dtype, where)
    if proto.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise WireError(f"a tensor of {proto.dtype} takes no gradient", where=where)
    return TensorShape(shape=tuple(proto.shape), dtype=dtype, requires_grad=proto.requires_grad)


def _leaf(proto: profile_pb2.Returned, where: str) -> Opaque:
    value = value_from_proto(proto.value, where)
    if not (value is None or isinstance(value, (int, float, str))):
        raise WireError(f"a {type(value).__name__} is no leaf of a result", where=where)
    return Opaque(value=value)


def _fields(
    fields: Iterable[profile_pb2.ReturnedField], inner: Callable[[profile_pb2.Returned], Result], where: str
) -> Result:
    read: dict[str, Result] = {}
    for each in fields:
        if each.name in read:
            raise WireError(f"two of its fields are called {each.name[:80]!r}", where=where)
        read[each.name] = inner(each.value)
    return read
