"""Profiles, to and from protobuf, including the results of remote calls.

Everything that is read is bounded: a worker answers calls from it, and plans with it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence

from fxlib.protocol.converter import DTYPE, Converter, D, FieldRule, M, amount, each_by
from fxlib.protocol.values import read_value, write_value
from fxlib.spec.profile import (
    MIN_BYTES_PER_S,
    CallProfile,
    NodeProfile,
    Opaque,
    Profile,
    Push,
    Result,
    ServerProfile,
    Spread,
    TensorShape,
)
from fxlib.utils.text import plain
from fxlib.v1 import graph_pb2, profile_pb2
from fxlib.wire.faults import DEFAULT, Excess, Fault

MAX_ELEMENTS = 1 << 32
"""Maximum number of elements of one tensor of a reply."""


def _write_returned(returned: Result) -> profile_pb2.Returned:
    """Write the structure of a result.

    Raises:
        Fault: a leaf other than a tensor cannot be written.
    """
    proto = profile_pb2.Returned()
    match returned:
        case TensorShape():
            proto.tensor.CopyFrom(_TENSOR.write(returned))
        case Opaque():
            proto.value.CopyFrom(write_value(returned.value))
        case tuple():
            proto.tuple.SetInParent()
            proto.tuple.items.extend(map(_write_returned, returned))
        case list():
            proto.list.SetInParent()
            proto.list.items.extend(map(_write_returned, returned))
        case dict():
            proto.fields.SetInParent()
            for name, each in returned.items():
                proto.fields.fields.add(name=name).value.CopyFrom(_write_returned(each))
    return proto


def _read_returned(proto: profile_pb2.Returned, depth: int = 0) -> Result:
    """Read the structure of a result.

    Raises:
        Fault: the structure is nested too deeply or of an unknown kind, a tensor in it is too large, or a leaf is not
            valid.
    """
    if depth > DEFAULT.nesting:
        raise Excess(f"is nested more than {DEFAULT.nesting} deep")

    def inner(each: profile_pb2.Returned) -> Result:
        return _read_returned(each, depth + 1)

    match proto.WhichOneof("kind"):
        case "tensor":
            return _read_tensor(proto.tensor)
        case "value":
            return _read_leaf(proto.value)
        case "tuple":
            return tuple(map(inner, proto.tuple.items))
        case "list":
            return list(map(inner, proto.list.items))
        case "fields":
            return _read_fields(proto.fields.fields, inner)
        case _:
            raise Fault("of an unknown kind")


RETURNED = FieldRule(_write_returned, _read_returned)
"""The rule of a field that holds what a call returned."""

_TENSOR = Converter(TensorShape, profile_pb2.TensorShape, text=None, rules={"dtype": DTYPE})


def _read_tensor(proto: profile_pb2.TensorShape) -> TensorShape:
    if len(proto.shape) > DEFAULT.tensor_dims:
        raise Excess(f"{len(proto.shape)} dimensions exceed the limit of {DEFAULT.tensor_dims}")
    if any(size < 0 for size in proto.shape):
        raise Fault("a size is negative")
    if (elements := math.prod(proto.shape)) > MAX_ELEMENTS:
        raise Excess(f"{elements:,} elements exceed the limit of {MAX_ELEMENTS:,}")
    read = _TENSOR.read(proto)
    if read.requires_grad and not (read.dtype.is_floating_point or read.dtype.is_complex):
        raise Fault(f"a tensor of {proto.dtype} cannot take a gradient")
    return read


def _read_leaf(proto: graph_pb2.Value) -> Opaque:
    value = read_value(proto)
    if not (value is None or isinstance(value, (int, float, str))):
        raise Fault(f"a {type(value).__name__} is not a leaf of a result")
    return Opaque(value=value)


def _read_fields(
    fields: Iterable[profile_pb2.ReturnedField], inner: Callable[[profile_pb2.Returned], Result]
) -> dict[str, Result]:
    read: dict[str, Result] = {}
    for each in fields:
        if each.name in read:
            raise Fault(f"two of its fields are called {each.name[:80]!r}")
        read[each.name] = inner(each.value)
    return read


MAX_CALLS = 100_000
MAX_NODES = 1_000_000
MAX_SERVERS = 256
MAX_NOTES = 1_000
MAX_QUANTILES = 1_001
MAX_TEXT = 4_000
"""Maximum number of characters of one name or note."""
MAX_TIME_S = 86_400.0
MAX_BYTES = 1 << 50
MAX_CONCURRENCY = 65_536


def profile_to_proto(profile: Profile) -> profile_pb2.Profile:
    """Write a profile.

    Raises:
        WireError: the format cannot represent a leaf of a result.
    """
    return _PROFILE.write_at("Profile", profile)


def profile_from_proto(proto: profile_pb2.Profile) -> Profile:
    """Read a profile; text for people in it becomes plain.

    Raises:
        LimitError: there is too much of something.
        WireError: a figure is not valid or out of range, a dtype or the kind of a result is unknown, or two parts share
            a name; the message names the field.
    """
    return _PROFILE.read_at("Profile", proto)


def _at_most(value: int, limit: int) -> int:
    if value > limit:
        raise Excess(f"{value:,} exceeds the limit of {limit:,}")
    return value


def _time(value: float) -> float:
    if amount(value) > MAX_TIME_S:
        raise Excess(f"{value:g} s exceeds the limit of {MAX_TIME_S:g}")
    return value


def _share(value: float) -> float:
    if not 0.0 < amount(value) <= 1.0:
        raise Fault(f"{value} is not a share")
    return value


def _size(value: int) -> int:
    if value < 0:
        raise Fault(f"{value} is not a valid amount")
    return _at_most(value, MAX_BYTES)


def _rate(value: float) -> float:
    if not MIN_BYTES_PER_S <= value <= MAX_BYTES:
        raise Fault(f"{value} is not a valid rate")
    return value


def _at_least_one(value: int) -> int:
    if value < 1:
        raise Fault("must be at least 1")
    return value


def _concurrency(value: int) -> int:
    return _at_most(_at_least_one(value), MAX_CONCURRENCY)


def _text(text: str) -> str:
    _at_most(len(text), MAX_TEXT)
    return text


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    _at_most(len(values), MAX_QUANTILES)
    quantiles = tuple(map(_time, values))
    if not quantiles or any(map(operator.gt, quantiles, quantiles[1:])):
        raise Fault("must be at least one, in ascending order")
    return quantiles


def _notes(notes: Sequence[str]) -> tuple[str, ...]:
    _at_most(len(notes), MAX_NOTES)
    return tuple(plain(_text(each)) for each in notes)


def _different(converter: Converter[D, M], limit: int, name: Callable[[D], str]) -> FieldRule:
    """Return the rule of a field that holds several values, no two with the same name."""

    def read(messages: Sequence[M]) -> tuple[D, ...]:
        _at_most(len(messages), limit)
        values = each_by(converter.read)(messages)
        if len({name(each) for each in values}) < len(values):
            raise Fault("two of them have one name")
        return values

    return FieldRule(converter.many.write, read)


_SIZE = FieldRule(read=_size)
_SPREAD = Converter(
    Spread, profile_pb2.Spread, rules={"quantiles": FieldRule(read=_quantiles), "count": FieldRule(read=_at_least_one)}
)
_PUSH = Converter(
    Push,
    profile_pb2.PushProfile,
    text=_text,
    number=_time,
    rules={"request_bytes": _SIZE, "service_s": _SPREAD.one},
)
_CALL = Converter(
    CallProfile,
    profile_pb2.CallProfile,
    text=_text,
    number=_time,
    rules={
        "request_bytes": _SIZE,
        "response_bytes": _SIZE,
        "returns": RETURNED,
        "service_s": _SPREAD.one,
        "push": _PUSH.one,
    },
)
_NODE = Converter(NodeProfile, profile_pb2.NodeProfile, text=_text, number=_time, rules={"output_bytes": _SIZE})
_SERVER = Converter(
    ServerProfile,
    profile_pb2.ServerProfile,
    text=_text,
    number=_time,
    rules={"concurrency": FieldRule(read=_concurrency), "bytes_per_s": FieldRule(read=_rate)},
)
_PROFILE = Converter(
    Profile,
    profile_pb2.Profile,
    text=lambda text: plain(_text(text)),
    number=_time,
    rules={
        "calls": _different(_CALL, MAX_CALLS, lambda each: each.call),
        "nodes": _different(_NODE, MAX_NODES, lambda each: each.node),
        "servers": _different(_SERVER, MAX_SERVERS, lambda each: each.name),
        "least_share": FieldRule(read=_share),
        "steps": _SIZE,
        "notes": FieldRule(read=_notes),
    },
)
