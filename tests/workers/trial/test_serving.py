"""What the servers of a trial cannot serve, where processes only say what they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import fxlib
from fxlib import wire
from fxlib.protocol import workload_from_proto
from fxlib.reasons import Reason
from fxlib.runtime.ops import remote_call
from fxlib.spec.profile import Profile, ServerProfile, TensorShape
from fxlib.spec.workload import RemoteObject, Server, Workload
from fxlib.v1.workload_pb2 import Workload as Message
from fxlib.wire import OpaqueRRef
from fxlib_workers.trial.failures import TrialError
from fxlib_workers.trial.requirements import requirements_of
from fxlib_workers.trial.serving import Serving, with_undescribed_servers
from fxlib_workers.trial.trainer import EncodedProgram
from tests.workers.replayed_model import Weighed, recorded, weighed_profile, workload


def nobody_has_any(processes: Sequence[Any], method: str, *args: object, **_: object) -> list[Any]:
    """Answer as servers without a module of the operator's do."""
    return [args[0] if method == "not_served" else None for _ in processes]


def serve(profile: Profile | None, asked: Workload | None = None) -> None:
    asked = asked or workload()
    required = requirements_of([fxlib.capture(Weighed())], asked)
    serving = Serving(nobody_has_any, asked, profile, (), 1.0)
    servers = [server.name for server in asked.servers]
    serving.start_replay(servers, ["trainer0"], required)
    serving.check(servers, required)


def test_what_the_profile_records_is_served() -> None:
    serve(weighed_profile())


@pytest.mark.parametrize(
    "profile, words",
    [
        (None, "fxlib.profile"),
        (Profile(), "measure the graph anew"),
        (
            Profile(calls=tuple(replace(each, push=None) for each in weighed_profile().calls)),
            "'tests.workers.remote_code:learn' on 'ps0'",
        ),
        (
            Profile(calls=(recorded("weigh", "x:y", "ps0", returns=TensorShape(shape=(1 << 40,), dtype=torch.int8)),)),
            "exceeds the limit",
        ),
    ],
)
def test_what_cannot_be_replayed_is_named_with_a_way_out(profile: Profile | None, words: str) -> None:
    with pytest.raises(TrialError) as caught:
        serve(profile)
    assert caught.value.reason is Reason.NO_SERVER
    assert words in caught.value.detail


@pytest.mark.parametrize(
    "process, concurrency, threads",
    [("ps0", 4, 16), ("ps0", 20, 20), ("ps0", 500, 64), ("undescribed", 4, 64), ("trainer0", 4, 16)],
)
def test_a_server_that_only_replays_has_threads_for_calls_in_their_latency(
    process: str, concurrency: int, threads: int
) -> None:
    figures = ServerProfile(name="ps0", round_trip_s=0.05, concurrency=concurrency, bytes_per_s=1e12)
    profile = Profile(servers=(figures, replace(figures, name="undescribed")))
    serving = Serving(nobody_has_any, workload(), profile, ("undescribed",), 1.0)
    assert serving.concurrent_calls(process) == threads


def test_calls_to_a_server_that_the_workload_does_not_have_are_named() -> None:
    with pytest.raises(TrialError) as caught:
        serve(None, workload(servers=(Server(name="ps0"),)))
    assert caught.value.reason is Reason.NO_SERVER
    assert "calls to 'ps1', which is none of the workload's servers" in caught.value.detail


class Held(nn.Module):
    """What a worker decodes of a model with two RRefs: `place` takes them away, as no process can make one here."""

    def __init__(self, *, here: bool = False) -> None:
        super().__init__()
        self.near = OpaqueRRef("near", "ps0", here=here)
        self.far = OpaqueRRef("far", "elsewhere", here=False)


def program(*, here: bool = False) -> EncodedProgram:
    root, graph = Held(here=here), Graph()
    x = graph.placeholder("x")
    called = [
        graph.call_function(remote_call, (graph.get_attr(name), ".forward", (x,), {}, None)) for name in ("near", "far")
    ]
    graph.output(tuple(called))
    message = wire.encode(GraphModule(root, graph)).graph
    return EncodedProgram(original=wire.serialize(message), workload=b"", blobs={})


def test_the_objects_behind_rrefs_that_a_model_holds_are_joined_to_the_workload_with_their_owners() -> None:
    described = RemoteObject(owner="ps0", cls="torch.nn:Linear", args=(4, 4))
    joined, carried, undescribed = with_undescribed_servers(workload(rrefs={"near": described}), program(), None)

    assert undescribed == ("elsewhere",)
    assert [server.name for server in joined.servers][-1] == "elsewhere"
    assert joined.rrefs == {"near": described, "far": RemoteObject(owner="elsewhere", cls="")}
    assert workload_from_proto(Message.FromString(carried.workload), {}).rrefs == joined.rrefs


def test_an_rref_to_an_object_of_the_launcher_itself_is_refused_with_a_way_out() -> None:
    with pytest.raises(TrialError) as caught:
        with_undescribed_servers(workload(), program(here=True), None)
    assert caught.value.reason is Reason.NO_SERVER
    assert "'near'" in caught.value.detail
    assert "Workload.rrefs" in caught.value.detail


def test_an_object_that_nobody_can_make_is_named_where_there_is_no_profile_to_replay_it_from() -> None:
    joined, _, _ = with_undescribed_servers(workload(), program(), None)

    def answers(processes: Sequence[Any], method: str, *args: Any, **_: object) -> list[Any]:
        return [list(args[0]) if method == "not_made" else [] for _ in processes]

    serving = Serving(answers, joined, None, (), 1.0)
    with pytest.raises(TrialError) as caught:
        serving.check(["ps0"], requirements_of([], joined))
    assert "the object behind 'far', the object behind 'near' (measure the job" in caught.value.detail
