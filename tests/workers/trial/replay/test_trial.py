"""Trials of jobs whose remote functions nobody but the job has: answered from a profile, in real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Graph, GraphModule

import fxlib
from fxlib import wire
from fxlib.protocol import workload_to_proto
from fxlib.recipes import recipes
from fxlib.runtime import functions
from fxlib.runtime.ops import issue_batch, remote_call
from fxlib.spec.contract import Contract
from fxlib.spec.profile import Opaque, Profile, Push
from fxlib.spec.workload import RemoteObject, Workload
from fxlib.wire import OpaqueRRef
from fxlib_workers.exchange import ORIGINAL
from fxlib_workers.trial.cluster_run import ClusterRun
from fxlib_workers.trial.digests import digest_all
from fxlib_workers.trial.nodes import Nodes
from fxlib_workers.trial.trainer import EncodedProgram, StepDigests
from tests.shared.undisturbed import undisturbed
from tests.workers import remote_code
from tests.workers.replayed_model import ROWS, Weighed, recorded, spread, weighed_profile, workload

pytestmark = pytest.mark.cluster

CANDIDATE = "candidate"


@contextmanager
def cluster(
    nodes: Nodes,
    model: nn.Module,
    workload: Workload,
    profile: Profile,
    **candidates: Callable[[GraphModule], GraphModule],
) -> Iterator[ClusterRun]:
    """A trial's processes with the original and its candidates."""
    encoded = workload_to_proto(workload)
    captured = model if isinstance(model, GraphModule) else fxlib.capture(model)
    graph = wire.serialize(wire.encode(captured).graph)
    program = EncodedProgram(original=graph, workload=encoded.message.SerializeToString(), blobs=dict(encoded.blobs))
    with ClusterRun(nodes, workload, program, lambda: False, profile) as made:
        made.prepare()
        for name, rewrite in candidates.items():
            rewritten = rewrite(wire.decode(wire.parse(graph)))
            made.load_candidate(name, wire.serialize(wire.encode(rewritten).graph), {}, workload.pipeline)
        yield made


def scheduled(graph: GraphModule) -> GraphModule:
    return recipes.apply(graph, "schedule").module


def traces(made: ClusterRun, arm: str, steps: int = 3) -> Sequence[StepDigests]:
    made.ask(made.trainers[:1], "reset", timeout_s=100)
    return [made.ask(made.trainers[:1], "digest_step", arm, step, timeout_s=100)[0] for step in range(steps)]


def seconds(made: ClusterRun, arm: str, steps: int = 10) -> float:
    return float(made.ask(made.trainers, "block", arm, 0, steps, timeout_s=100)[0])


class Attached(nn.Module):
    """A read that distributed autograd sends a gradient home to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", remote_code.double, args=(rows.long(),))
        second = rpc.rpc_sync("ps1", remote_code.double, args=(rows.long(),))
        return self.linear(x) * first + second


class Mixed(nn.Module):
    """A read, a write and the read again; a result that stays on its server; methods of objects behind RRefs.

    Wrongly, where `stale`, both reads come before the write.
    """

    def __init__(self, *, stale: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stale = stale

    def forward(self, x: torch.Tensor, rows: torch.Tensor, near: object, far: object) -> tuple[torch.Tensor, ...]:
        first = rpc.rpc_sync("ps0", remote_code.weigh, args=(rows,))
        if self.stale:
            second = rpc.rpc_sync("ps0", remote_code.weigh, args=(rows,))
        rpc.rpc_sync("ps0", remote_code.learn, args=(rows, rows))
        if not self.stale:
            second = rpc.rpc_sync("ps0", remote_code.weigh, args=(rows,))
        a = near.rpc_sync().forward(x)  # type: ignore[attr-defined]
        b = far.rpc_sync().forward(x)  # type: ignore[attr-defined]
        c = far.rpc_sync().forward(x + 1)  # type: ignore[attr-defined]
        made = rpc.remote("ps1", remote_code.learn, args=(rows, rows))
        return self.linear(x) + first + second, made.to_here(), a + b + c


@pytest.fixture(scope="module")
def mixed(nodes: Nodes) -> Iterator[ClusterRun]:
    """The processes of one model for several tests, each of which begins with their first state."""
    name = "tests.workers.remote_code"
    profile = Profile(
        calls=(
            recorded("weigh", f"{name}:weigh", "ps0"),
            recorded("weigh_1", f"{name}:weigh", "ps0"),
            recorded("learn", f"{name}:learn", "ps0", returns=Opaque()),
            recorded("fetch", "fetch", "ps1"),
            recorded("forward", ".forward", "ps0"),
            recorded("forward_1", ".forward", "ps1", seconds=0.02),
            recorded("forward_2", ".forward", "ps1"),
        )
    )
    rrefs = {
        "near": RemoteObject(owner="ps0", cls="torch.nn:Linear", args=(4, 4)),
        "far": RemoteObject(owner="ps1", cls=f"{name}:Scale", kwargs={"width": 4}),
    }
    candidates = {
        CANDIDATE: lambda graph: recipes.apply(graph, assume="reads").module,
        "stale": lambda _: fxlib.capture(Mixed(stale=True)),
    }
    with cluster(nodes, Mixed(), workload(rrefs=rrefs, assume="reads"), profile, **candidates) as made:
        yield made


def test_calls_are_answered_the_same_and_take_their_time_however_they_travel(nodes: Nodes) -> None:
    """Each by itself, overlapped, and in one message; by servers that only the profile knows."""

    def batched(graph: GraphModule) -> GraphModule:
        module = recipes.apply(graph, "schedule", profile=profile).module
        assert any(node.target is issue_batch for node in module.graph.nodes)
        return module

    profile = weighed_profile(per_item_s=0.0)
    with cluster(nodes, Weighed(), workload(servers=()), profile, candidate=scheduled, batched=batched) as made:
        before = traces(made, ORIGINAL)
        assert [before] * 3 == [traces(made, arm) for arm in (ORIGINAL, CANDIDATE, "batched")]
        replayed = [f"server {name}: writes that were replayed" for name in ("ps0", "ps1")]
        assert all(before[0][name] != before[1][name] for name in replayed)
        original_s = min(seconds(made, ORIGINAL) for _ in range(2))
        assert original_s > 10 * (3 * 0.01 + 3 * 0.005)
        candidate_s = undisturbed(lambda: seconds(made, CANDIDATE), lambda took_s: took_s < 0.9 * original_s)
        assert candidate_s < 0.9 * original_s


class Keyed(nn.Module):
    """A read whose contract names its keys, as that of the push of its gradient does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = rpc.rpc_sync("ps0", remote_code.rows, args=(ids,))
        return self.linear(x) * found


def test_reads_that_ran_ahead_bring_the_same_rows_and_stale_ones_show(nodes: Nodes) -> None:
    def missing_conflicts(graph: GraphModule) -> GraphModule:
        """Have the read say that it is of other state than the push writes, so that it runs ahead, and stays."""
        for node in graph.graph.nodes:
            if (contract := node.meta.get("contract")) is not None and contract.is_read:
                node.meta["contract"] = replace(contract, reads=frozenset({"elsewhere"}))
        return graph

    name = "tests.workers.remote_code"
    push = Push(function=f"{name}:change", request_bytes=128, issue_s=1e-4, service_s=spread(0.005), ready_s=1e-3)
    profile = Profile(
        calls=(recorded("rows", f"{name}:rows", "ps0", push=push),), servers=weighed_profile().servers, steps=1
    )
    steps = workload(pipeline=1)
    with cluster(nodes, Keyed(), steps, profile, candidate=scheduled, stale=missing_conflicts) as made:
        before = traces(made, ORIGINAL, steps=8)
        assert before == traces(made, CANDIDATE, steps=8)
        stale = traces(made, "stale", steps=8)
        assert stale[0] == before[0]  # nothing has run ahead of the first step
        assert stale[-1] != before[-1]
        assert seconds(made, CANDIDATE) > 0.0


def test_trainers_that_share_a_replayed_server_wait_for_each_other_there(nodes: Nodes) -> None:
    recorded_ = weighed_profile()
    one_at_once = tuple(replace(server, concurrency=1) for server in recorded_.servers)
    profile = replace(recorded_, servers=one_at_once)
    with cluster(nodes, Weighed(), workload(trainers=2), profile, candidate=scheduled) as made:
        before = traces(made, ORIGINAL)
        assert before == traces(made, CANDIDATE)
        together_s = min(made.ask(made.trainers, "block", CANDIDATE, 0, 5, timeout_s=100))

        def alone_s() -> float:
            return float(made.ask(made.trainers[:1], "block", CANDIDATE, 0, 5, timeout_s=100)[0])

        # Overlapped, the calls to one server are most of a step.
        assert undisturbed(alone_s, lambda took_s: together_s > 1.3 * took_s) < together_s / 1.3

        def concurrency() -> object:
            return made.ask(made.trainers[:1], "profile", 0.5, timeout_s=100)[0].servers[0].concurrency

        assert undisturbed(concurrency, lambda found: found == 1) == 1


def test_gradients_come_home_under_distributed_autograd_and_are_compared(nodes: Nodes) -> None:
    rows = replace(ROWS, requires_grad=True)
    name = "tests.workers.remote_code:double"
    profile = Profile(
        calls=tuple(recorded(call, name, to, returns=rows) for call, to in (("double", "ps0"), ("double_1", "ps1")))
    )
    with cluster(nodes, Attached(), workload(mode="distributed"), profile, candidate=scheduled) as made:
        before = traces(made, ORIGINAL)
        assert before == traces(made, CANDIDATE)
        nothing = digest_all({})
        assert {before[0]["gradients on server ps0"], before[0]["gradients on server ps1"]}.isdisjoint({nothing})
        written = [each["server ps0: writes that were replayed"] for each in before]
        assert len(set(written)) == len(written)


class Held(nn.Module):
    """A model with RRefs to objects of classes that only the job has, as a worker decodes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.near = OpaqueRRef("near", "ps0", here=False)
        self.far = OpaqueRRef("far", "ps1", here=False)


def holding_rref() -> GraphModule:
    """Two independent reads, and a third through a helper, of what they returned."""
    graph = Graph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    near, far = graph.get_attr("near"), graph.get_attr("far")
    first = graph.call_function(remote_call, (near, ".forward", (rows,), {}, None))
    second = graph.call_function(remote_call, (far, ".forward", (rows,), {}, None))
    both = graph.call_function(torch.add, (first, second))
    method = graph.call_function(functions.resolve, ("job.model:Decoder.forward",))
    third = graph.call_function(remote_call, ("ps1", "job.model:call_method", (method, far, both), {}, None))
    graph.output(graph.call_function(torch.add, (graph.call_module("linear", (x,)), third)))
    for name, node in (("forward", first), ("forward_1", second), ("call_method", third)):
        node.meta |= {"call": name, "contract": Contract(reads=frozenset({"weight"}))}
    return GraphModule(Held(), graph)


def test_rrefs_that_a_model_holds_are_replayed_and_chains_of_calls_come_home_under_distributed_autograd(
    nodes: Nodes,
) -> None:
    rows = replace(ROWS, requires_grad=True)
    profile = Profile(
        calls=(
            recorded("forward", ".forward", "ps0", returns=rows),
            recorded("forward_1", ".forward", "ps1", returns=rows),
            recorded("call_method", "job.model:call_method", "ps1", returns=rows),
        )
    )
    with cluster(nodes, holding_rref(), workload(mode="distributed", servers=()), profile, candidate=scheduled) as made:
        before = traces(made, ORIGINAL)
        assert before == traces(made, CANDIDATE)
        nothing = digest_all({})
        assert {before[0]["gradients on server ps0"], before[0]["gradients on server ps1"]}.isdisjoint({nothing})
        original_s = min(seconds(made, ORIGINAL) for _ in range(2))
        candidate_s = undisturbed(lambda: seconds(made, CANDIDATE), lambda took_s: took_s < 0.9 * original_s)
        assert candidate_s < 0.9 * original_s


def test_a_schedule_of_calls_of_all_kinds_is_the_same_as_its_original(mixed: ClusterRun) -> None:
    assert traces(mixed, ORIGINAL) == traces(mixed, CANDIDATE)


def test_a_read_that_a_write_was_moved_before_shows(mixed: ClusterRun) -> None:
    original, candidate = traces(mixed, ORIGINAL, 1), traces(mixed, "stale", 1)
    assert original == traces(mixed, ORIGINAL, 1)
    assert original[0]["output[0]"] != candidate[0]["output[0]"]
    assert original[0]["output[1]"] == candidate[0]["output[1]"]


def test_what_is_created_on_a_server_is_fetched_as_recorded(mixed: ClusterRun) -> None:
    first, second = (trace["output[1]"] for trace in traces(mixed, ORIGINAL, 2))
    assert first != second


def test_methods_of_objects_are_answered_beside_real_ones(mixed: ClusterRun) -> None:
    (trace,) = traces(mixed, ORIGINAL, 1)
    assert "server ps0: state of object 'near'" in trace
    assert "server ps1: state of object 'far'" not in trace
