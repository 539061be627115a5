"""Graphs of a trial whose replayed functions are called together with the name of the call."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Graph, GraphModule, Node

import fxlib
from fxlib import ps
from fxlib.runtime import functions, ops
from fxlib.runtime.ops import issue_batch, wait_item
from fxlib.runtime.ops.batches import NamedCall, items_of
from fxlib.spec.contract import Contract, contract_of
from fxlib.spec.profile import Opaque, Spread
from fxlib_workers.trial.replay.clients import stand_in
from fxlib_workers.trial.replay.plan import RecordedCall, ReplayPlan
from fxlib_workers.trial.replay.server import ReplayedBatch, ReplayedFunction
from tests.workers import remote_code

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
