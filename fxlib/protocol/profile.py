"""Profiles, to and from protobuf. Whatever is read is bounded: a worker serves from it, and plans by it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from fxlib.protocol.converter import Converter, D, M, Rule, each_by
from fxlib.protocol.plain import amount, plain
from fxlib.protocol.returned import RETURNED
from fxlib.spec.profile import MIN_BYTES_PER_S, CallProfile, NodeProfile, Profile, Push, ServerProfile, Spread
from fxlib.v1 import profile_pb2
from fxlib.wire.faults import Excess, Fault

MAX_CALLS = 100_000
MAX_NODES = 1_000_000
MAX_SERVERS = 256
MAX_NOTES = 1_000
MAX_QUANTILES = 1_001
MAX_TEXT = 4_000
"""Characters of one name or note."""
MAX_TIME_S = 86_400.0
MAX_BYTES = 1 << 50
MAX_CONCURRENCY = 65_536


def profile_to_proto(profile: Profile) -> profile_pb2.Profile:
    """Write a profile.

    Raises:
        WireError: a leaf of a result has no place in the format.
    """
    return _PROFILE.write_at("Profile", profile)


def profile_from_proto(proto: profile_pb2.Profile) -> Profile:
    """Read a profile; text in it that people read becomes plain.

    Raises:
        LimitError: there is too much of something.
        WireError: a figure is none or out of range, a dtype or the kind of a result is unknown, or two parts share a
            name; names the field.
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
        raise Fault(f"{value} is no share")
    return value


def _size(value: int) -> int:
    if value < 0:
        raise Fault(f"{value} is no amount")
    return _at_most(value, MAX_BYTES)


def _rate(value: float) -> float:
    if not MIN_BYTES_PER_S <= value <= MAX_BYTES:
        raise Fault(f"{value} is no rate")
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


def _different(converter: Converter[D, M], limit: int, name: Callable[[D], str]) -> Rule:
    """Return the rule of a field that holds several, no two of one name."""

    def read(messages: Sequence[M]) -> tuple[D, ...]:
        _at_most(len(messages), limit)
        values = each_by(converter.read)(messages)
        if len({name(each) for each in values}) < len(values):
            raise Fault("two of them have one name")
        return values

    return Rule(converter.many.write, read)


_SIZE = Rule(read=_size)
_SPREAD = Converter(
    Spread, profile_pb2.Spread, rules={"quantiles": Rule(read=_quantiles), "count": Rule(read=_at_least_one)}
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
    rules={"concurrency": Rule(read=_concurrency), "bytes_per_s": Rule(read=_rate)},
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
        "least_share": Rule(read=_share),
        "steps": _SIZE,
        "notes": Rule(read=_notes),
    },
)
