"""Profiles, to and from protobuf. Whatever is read is bounded: a worker serves from it, and plans by it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fxlib.errors import LimitError, WireError
from fxlib.protocol.plain import amount, plain
from fxlib.protocol.returned import returned_from_proto, returned_to_proto
from fxlib.spec.profile import MIN_BYTES_PER_S, CallProfile, NodeProfile, Profile, Push, ServerProfile, Spread
from fxlib.v1 import profile_pb2

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
    return profile_pb2.Profile(
        calls=[_call_to_proto(each) for each in profile.calls],
        nodes=[
            profile_pb2.NodeProfile(node=each.node, seconds=each.seconds, output_bytes=each.output_bytes)
            for each in profile.nodes
        ],
        servers=[
            profile_pb2.ServerProfile(
                name=each.name,
                round_trip_s=each.round_trip_s,
                concurrency=each.concurrency,
                bytes_per_s=each.bytes_per_s,
                per_item_s=each.per_item_s,
                per_call_s=each.per_call_s,
                per_turn_s=each.per_turn_s,
            )
            for each in profile.servers
        ],
        loss_s=profile.loss_s,
        backward_s=profile.backward_s,
        rest_s=profile.rest_s,
        step_s=profile.step_s,
        least_share=profile.least_share,
        steps=profile.steps,
        hardware=profile.hardware,
        torch_version=profile.torch_version,
        notes=profile.notes,
    )


def profile_from_proto(proto: profile_pb2.Profile) -> Profile:
    """Read a profile; text in it that people read becomes plain.

    Raises:
        LimitError: there is too much of something.
        WireError: a figure is none or out of range, a dtype or the kind of a result is unknown, or two parts share a
            name; names the field.
    """
    for name, limit in (("calls", MAX_CALLS), ("nodes", MAX_NODES), ("servers", MAX_SERVERS), ("notes", MAX_NOTES)):
        _at_most(len(getattr(proto, name)), limit, f"Profile.{name}")
    _different((each.call for each in proto.calls), "Profile.calls")
    _different((each.node for each in proto.nodes), "Profile.nodes")
    _different((each.name for each in proto.servers), "Profile.servers")
    return Profile(
        calls=tuple(_call_from_proto(each, f"Profile.calls[{place}]") for place, each in enumerate(proto.calls)),
        nodes=tuple(_node_from_proto(each) for each in proto.nodes),
        servers=tuple(_server_from_proto(each, f"Profile.servers[{i}]") for i, each in enumerate(proto.servers)),
        loss_s=_time(proto.loss_s, "Profile.loss_s"),
        backward_s=_time(proto.backward_s, "Profile.backward_s"),
        rest_s=_time(proto.rest_s, "Profile.rest_s"),
        step_s=_time(proto.step_s, "Profile.step_s"),
        least_share=_share(proto.least_share, "Profile.least_share") if proto.HasField("least_share") else 1.0,
        steps=_count(proto.steps, MAX_BYTES, "Profile.steps"),
        hardware=plain(_text(proto.hardware, "Profile.hardware")),
        torch_version=plain(_text(proto.torch_version, "Profile.torch_version")),
        notes=tuple(plain(_text(each, "Profile.notes")) for each in proto.notes),
    )


def _call_to_proto(call: CallProfile) -> profile_pb2.CallProfile:
    proto = profile_pb2.CallProfile(
        call=call.call,
        function=call.function,
        to=call.to,
        request_bytes=call.request_bytes,
        response_bytes=call.response_bytes,
        returns=returned_to_proto(call.returns, f"Profile.calls[{call.call!r}].returns"),
        issue_s=call.issue_s,
        wait_s=call.wait_s,
        service_s=_spread_to_proto(call.service_s),
        wake_s=call.wake_s,
    )
    if (push := call.push) is not None:
        proto.push.CopyFrom(
            profile_pb2.PushProfile(
                function=push.function,
                request_bytes=push.request_bytes,
                issue_s=push.issue_s,
                service_s=_spread_to_proto(push.service_s),
                ready_s=push.ready_s,
            )
        )
    return proto


def _call_from_proto(proto: profile_pb2.CallProfile, where: str) -> CallProfile:
    return CallProfile(
        call=_text(proto.call, f"{where}.call"),
        function=_text(proto.function, f"{where}.function"),
        to=_text(proto.to, f"{where}.to"),
        request_bytes=_count(proto.request_bytes, MAX_BYTES, f"{where}.request_bytes"),
        response_bytes=_count(proto.response_bytes, MAX_BYTES, f"{where}.response_bytes"),
        returns=returned_from_proto(proto.returns, f"{where}.returns"),
        issue_s=_time(proto.issue_s, f"{where}.issue_s"),
        wait_s=_time(proto.wait_s, f"{where}.wait_s"),
        service_s=_spread_from_proto(proto.service_s, f"{where}.service_s"),
        wake_s=_time(proto.wake_s, f"{where}.wake_s"),
        push=_push_from_proto(proto.push, f"{where}.push") if proto.HasField("push") else None,
    )


def _push_from_proto(proto: profile_pb2.PushProfile, where: str) -> Push:
    return Push(
        function=_text(proto.function, f"{where}.function"),
        request_bytes=_count(proto.request_bytes, MAX_BYTES, f"{where}.request_bytes"),
        issue_s=_time(proto.issue_s, f"{where}.issue_s"),
        service_s=_spread_from_proto(proto.service_s, f"{where}.service_s"),
        ready_s=_time(proto.ready_s, f"{where}.ready_s"),
    )


def _server_from_proto(proto: profile_pb2.ServerProfile, where: str) -> ServerProfile:
    if not (MIN_BYTES_PER_S <= proto.bytes_per_s <= MAX_BYTES):
        raise WireError(f"{proto.bytes_per_s} is no rate", where=f"{where}.bytes_per_s")
    if proto.concurrency < 1:
        raise WireError("must be at least 1", where=f"{where}.concurrency")
    return ServerProfile(
        name=_text(proto.name, f"{where}.name"),
        round_trip_s=_time(proto.round_trip_s, f"{where}.round_trip_s"),
        concurrency=_count(proto.concurrency, MAX_CONCURRENCY, f"{where}.concurrency"),
        bytes_per_s=proto.bytes_per_s,
        per_item_s=_time(proto.per_item_s, f"{where}.per_item_s") if proto.HasField("per_item_s") else None,
        per_call_s=_time(proto.per_call_s, f"{where}.per_call_s") if proto.HasField("per_call_s") else None,
        per_turn_s=_time(proto.per_turn_s, f"{where}.per_turn_s") if proto.HasField("per_turn_s") else None,
    )


def _node_from_proto(proto: profile_pb2.NodeProfile) -> NodeProfile:
    where = f"Profile.nodes[{proto.node[:80]!r}]"
    return NodeProfile(
        node=_text(proto.node, where),
        seconds=_time(proto.seconds, f"{where}.seconds"),
        output_bytes=_count(proto.output_bytes, MAX_BYTES, f"{where}.output_bytes"),
    )


def _spread_to_proto(spread: Spread) -> profile_pb2.Spread:
    return profile_pb2.Spread(quantiles=spread.quantiles, count=spread.count)


def _spread_from_proto(proto: profile_pb2.Spread, where: str) -> Spread:
    _at_most(len(proto.quantiles), MAX_QUANTILES, f"{where}.quantiles")
    quantiles = tuple(_time(each, f"{where}.quantiles") for each in proto.quantiles)
    if not quantiles or list(quantiles) != sorted(quantiles):
        raise WireError("must be at least one, in ascending order", where=f"{where}.quantiles")
    if proto.count < 1:
        raise WireError("must be at least 1", where=f"{where}.count")
    return Spread(quantiles=quantiles, count=proto.count)


def _time(value: float, where: str) -> float:
    if amount(value, where) > MAX_TIME_S:
        raise LimitError(f"{value:g} s exceeds the limit of {MAX_TIME_S:g}", where=where)
    return value


def _share(value: float, where: str) -> float:
    if not 0.0 < amount(value, where) <= 1.0:
        raise WireError(f"{value} is no share", where=where)
    return value


def _count(value: int, limit: int, where: str) -> int:
    if value < 0:
        raise WireError(f"{value} is no amount", where=where)
    _at_most(value, limit, where)
    return value


def _text(text: str, where: str) -> str:
    _at_most(len(text), MAX_TEXT, where)
    return text


def _at_most(value: int, limit: int, where: str) -> None:
    if value > limit:
        raise LimitError(f"{value:,} exceeds the limit of {limit:,}", where=where)


def _different(names: Iterable[str], where: str) -> None:
    listed: Collection[str] = list(names)
    if len(set(listed)) < len(listed):
        raise WireError("two of them have one name", where=where)
