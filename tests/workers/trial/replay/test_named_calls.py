"""The names of servers that stand for what clients of the job's own reach, and of functions called for one call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import rpc
from torch.fx import Graph, GraphModule, Node

import fxlib
from fxlib import ps, wire
from fxlib.runtime import functions, ops
from fxlib.runtime.ops import issue_batch, wait_item
from fxlib.runtime.ops.batches import NamedCall
from fxlib.runtime.ops.registry import items_of
from fxlib.spec.contract import Contract, contract_of
from fxlib.spec.profile import CallProfile, Opaque, Profile, ServerProfile, Spread
from fxlib.spec.servers import is_worker_name
from fxlib_workers.trial.replay.named_calls import reached_by, stand_in, with_remote_calls, worker_name
from fxlib_workers.trial.replay.plan import RecordedCall, ReplayPlan
from fxlib_workers.trial.replay.server import ReplayedBatch, ReplayedFunction
from tests.workers import remote_code

pytestmark = pytest.mark.slow

texts = st.text(max_size=200)
WEIGH, LEARN = "tests.workers.remote_code:weigh", "tests.workers.remote_code:learn"
LINE = RecordedCall(to="ps0", returns=Opaque(), service_s=Spread(quantiles=(0.0,)), request_bytes=0, response_bytes=0)
LEARNS = Contract(writes=frozenset({"weights"}))
PLAN = ReplayPlan(
    calls={
        WEIGH: {"weigh": LINE, "weigh_1": LINE},
        LEARN: {"weigh": LINE, "weigh_1": LINE},
        ".forward": {"forward": LINE},
    },
    functions=frozenset({WEIGH, LEARN}),
    objects=frozenset({"far"}),
    contracts={LEARN: LEARNS},
)


@given(texts)
@example("features.example.com:8000")
@example("a" * 200)
@example(":61:")
@example("::" * 100)
def test_a_name_is_one_that_a_worker_may_have(reached: str) -> None:
    assert is_worker_name(worker_name(reached))


@given(st.text(max_size=20))
@example("features.example.com:8000")
@example("\N{GRINNING FACE}é:61:")
def test_a_short_name_leads_back_to_what_the_client_reaches(reached: str) -> None:
    assert reached_by(worker_name(reached)) == reached or len(worker_name(reached)) == 120


@given(texts, texts)
@example("a" * 150 + "b", "a" * 150 + "c")
@example("." * 60, "." * 61)
def test_different_texts_have_different_names(one: str, other: str) -> None:
    assert (worker_name(one) == worker_name(other)) == (one == other)


@given(st.from_regex(r"client:[A-Za-z0-9_:-]{0,119}", fullmatch=True))
@example("client::110000:")  # beyond the last character
@example("client::d800:")  # half of a surrogate pair, which no message holds
@example("client::" + "f" * 100 + ":")
@example("client::61:")  # `worker_name` does not escape an "a"
@example("client::00002e:")
def test_a_name_that_nothing_was_turned_into_stays_as_it_is(worker: str) -> None:
    reached = reached_by(worker)
    reached.encode()
    assert reached == worker or worker_name(reached) == worker


def test_a_server_of_the_profile_that_has_the_name_of_a_stand_in_gives_way() -> None:
    name = worker_name("features.example.com")
    servers = tuple(
        ServerProfile(name=each, round_trip_s=0.0, concurrency=count, bytes_per_s=1.0)
        for each, count in ((name, 1), ("features.example.com", 2))
    )
    call = CallProfile(
        call="fetch",
        function="shop.features:fetch",
        to="features.example.com",
        request_bytes=0,
        response_bytes=0,
        returns=Opaque(),
        issue_s=0.0,
        wait_s=0.0,
        service_s=Spread(quantiles=(0.0,)),
    )
    turned = with_remote_calls(Profile(calls=(call,), servers=servers), _graph_of_client())
    assert turned is not None
    assert [each.to for each in turned.calls] == [name]
    assert turned.server_by_name[name].concurrency == 2
    assert len({each.name for each in turned.servers}) == len(turned.servers)


def _graph_of_client() -> bytes:
    graph = Graph()
    graph.output(graph.placeholder("x"))
    message = wire.encode(GraphModule(nn.Module(), graph)).graph
    message.clients.add(function="shop.features:fetch")
    return message.SerializeToString()


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", remote_code.weigh, args=(x,))
        second = rpc.rpc_sync("ps0", remote_code.weigh, args=(x,))
        return first + second + rpc.rpc_sync("ps0", ps.lookup, args=("t", x))


class Far(nn.Module):
    def forward(self, x: torch.Tensor, near: object, far: object) -> torch.Tensor:
        return near.rpc_sync().forward(x) + far.rpc_sync().forward(x)  # type: ignore[attr-defined]


def named(module: GraphModule, target: object, place: int) -> list[str]:
    return [str(node.args[place]) for node in module.graph.nodes if node.target is target]


def test_calls_and_pushes_of_what_nobody_has_are_called_by_stand_ins() -> None:
    module = fxlib.capture(Model())
    stand_in(module, PLAN)
    assert named(module, ops.remote_call, 1) == [f"{WEIGH}#weigh", f"{WEIGH}#weigh_1", "fxlib.ps:lookup"]
    assert named(module, ops.track_gradient, 2) == [f"{LEARN}#weigh", f"{LEARN}#weigh_1", "fxlib.ps:push"]
    assert functions.resolve(f"{WEIGH}#weigh_1") == ReplayedFunction(WEIGH, "weigh_1")
    assert contract_of(functions.resolve(f"{LEARN}#weigh")) == LEARNS
    assert f"{WEIGH}#weigh_1" in module.code


def test_without_anything_to_replay_a_graph_stays_as_it_is() -> None:
    module = fxlib.capture(Model())
    before = module.code
    stand_in(module, ReplayPlan(calls=PLAN.calls))
    assert module.code == before


def test_methods_are_named_on_the_objects_that_nobody_can_make() -> None:
    module = fxlib.capture(Far())
    stand_in(module, PLAN)
    assert named(module, ops.remote_call, 1) == [".forward", ".forward#forward_1"]


def test_graphs_within_graphs_are_named_too() -> None:
    outer = Graph()
    outer.output(outer.call_module("inner"))
    inner = fxlib.capture(Model())
    stand_in(GraphModule(nn.ModuleDict({"inner": inner}), outer), PLAN)
    assert f"{WEIGH}#weigh" in inner.code


def batched() -> tuple[GraphModule, Node]:
    graph = Graph()
    x = graph.placeholder("x")
    calls: tuple[NamedCall, ...] = ((WEIGH, (x,), {}), (WEIGH, (x,), {}))
    batch = graph.call_function(issue_batch, ("ps0", calls, None, "tests.workers.remote_code:weigh_all"))
    rows = []
    for index, call in enumerate(("weigh_1", "weigh")):
        rows.append(graph.call_function(wait_item, (batch, index)))
        rows[-1].meta["call"] = call
    graph.output(tuple(rows))
    return GraphModule(nn.Module(), graph), batch


def test_the_calls_of_a_batch_are_named_by_their_waits_and_so_is_its_declared_form() -> None:
    module, batch = batched()
    stand_in(module, PLAN)
    form = batch.args[3]
    assert [item.function for item in items_of(batch)] == [f"{WEIGH}#weigh_1", f"{WEIGH}#weigh"]
    assert isinstance(form, str)
    assert isinstance(functions.resolve(form), ReplayedBatch)
