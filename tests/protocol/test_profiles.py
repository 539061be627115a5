"""A profile that arrives is bounded in every figure: a worker serves from it, and plans by it."""

from collections.abc import Callable

import pytest
import torch

from fxlib import Profile, protocol
from fxlib.errors import FxlibError, LimitError, WireError
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, ServerProfile, Spread, TensorShape
from fxlib.v1 import profile_pb2

PROFILE = Profile(
    calls=(
        CallProfile(
            call="lookup",
            function="my.ps:lookup",
            to="ps0",
            request_bytes=10,
            response_bytes=20,
            returns=(TensorShape(shape=(2, 3), dtype=torch.float32), {"rest": [Opaque(value=1)]}),
            issue_s=1e-4,
            wait_s=1e-5,
            service_s=Spread.of([2e-3, 1e-3]),
        ),
    ),
    nodes=(NodeProfile(node="add", seconds=1e-5, output_bytes=24),),
    servers=(ServerProfile(name="ps0", round_trip_s=3e-4, concurrency=4, bytes_per_s=1e9),),
    steps=10,
)

Change = Callable[[profile_pb2.Profile], object]


def nested(depth: int) -> profile_pb2.Returned:
    outer = inner = profile_pb2.Returned()
    for _ in range(depth):
        inner = inner.list.items.add()
    inner.tensor.dtype = "float32"
    return outer


def first_tensor(profile: profile_pb2.Profile) -> profile_pb2.TensorShape:
    return profile.calls[0].returns.tuple.items[0].tensor


CHANGES: dict[str, tuple[str, Change]] = {
    "a time that is not a number": ("is not a valid amount", lambda it: setattr(it, "backward_s", float("nan"))),
    "a time without end": ("is not a valid amount", lambda it: setattr(it.calls[0], "issue_s", float("inf"))),
    "a time below nothing": ("is not a valid amount", lambda it: setattr(it.nodes[0], "seconds", -1e-9)),
    "a time longer than a day": ("exceeds the limit", lambda it: setattr(it.servers[0], "round_trip_s", 1e6)),
    "quantiles that descend": ("ascending", lambda it: it.calls[0].service_s.quantiles.append(0.0)),
    "no quantile": ("at least one", lambda it: it.calls[0].service_s.ClearField("quantiles")),
    "very many quantiles": ("exceeds the limit", lambda it: it.calls[0].service_s.quantiles.extend([1.0] * 2_000)),
    "a count of nothing": ("at least 1", lambda it: setattr(it.calls[0].service_s, "count", 0)),
    "bytes below nothing": ("is not a valid amount", lambda it: setattr(it.calls[0], "request_bytes", -1)),
    "very many bytes": ("exceeds the limit", lambda it: setattr(it.nodes[0], "output_bytes", 1 << 60)),
    "a server that works on no call": ("at least 1", lambda it: setattr(it.servers[0], "concurrency", 0)),
    "a server of a million threads": ("exceeds the limit", lambda it: setattr(it.servers[0], "concurrency", 10**6)),
    "a way that carries nothing": ("is not a valid rate", lambda it: setattr(it.servers[0], "bytes_per_s", 0.0)),
    "a way that hardly carries": ("is not a valid rate", lambda it: setattr(it.servers[0], "bytes_per_s", 5e-324)),
    "a way without limit": ("is not a valid rate", lambda it: setattr(it.servers[0], "bytes_per_s", float("inf"))),
    "two calls of one name": ("one name", lambda it: it.calls.append(it.calls[0])),
    "two servers of one name": ("one name", lambda it: it.servers.append(it.servers[0])),
    "more servers than a trial has": ("exceeds the limit", lambda it: it.servers.extend([it.servers[0]] * 300)),
    "a long name": ("exceeds the limit", lambda it: setattr(it.calls[0], "function", "f" * 5_000)),
    "a dtype that is none": (
        "no dtype",
        lambda it: setattr(it.calls[0].returns.tuple.items[0].tensor, "dtype", "pickle"),
    ),
    "a huge tensor": ("exceed the limit", lambda it: first_tensor(it).shape.extend([1 << 33])),
    "a size below nothing": ("is negative", lambda it: first_tensor(it).shape.extend([-1])),
    "very many dimensions": ("dimensions", lambda it: first_tensor(it).shape.extend([1] * 70)),
    "a result of a newer kind": ("unknown kind", lambda it: it.calls[0].ClearField("returns")),
    "a result without bottom": ("nested", lambda it: it.calls[0].returns.CopyFrom(nested(33))),
    "very many notes": ("exceeds the limit", lambda it: it.notes.extend(["n"] * 1_001)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_out_of_bounds_is_refused_by_its_field(name: str) -> None:
    problem, change = CHANGES[name]
    message = protocol.profile_to_proto(PROFILE)
    change(message)
    with pytest.raises((WireError, LimitError), match=problem) as caught:
        protocol.profile_from_proto(message)
    assert caught.value.where.startswith("Profile.")


def test_integers_that_ask_for_a_gradient_are_refused() -> None:
    message = protocol.profile_to_proto(PROFILE)
    tensor = first_tensor(message)
    tensor.dtype, tensor.requires_grad = "int64", True
    with pytest.raises(WireError, match="cannot take a gradient"):
        protocol.profile_from_proto(message)


def test_a_leaf_that_is_no_number_text_or_none_is_refused() -> None:
    message = protocol.profile_to_proto(PROFILE)
    message.calls[0].returns.CopyFrom(profile_pb2.Returned(value=protocol.value_to_proto((1, 2), "here")))
    with pytest.raises(FxlibError, match="not a leaf"):
        protocol.profile_from_proto(message)


def test_notes_steer_no_terminal() -> None:
    message = protocol.profile_to_proto(PROFILE)
    message.notes.append("\x1b[2Jgone")
    assert protocol.profile_from_proto(message).notes == (" [2Jgone",)
