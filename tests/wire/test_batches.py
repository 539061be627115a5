"""Batches of calls on the wire: they come back as they were, and nothing else passes for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from fxlib import wire
from fxlib.runtime.ops import issue_batch, wait_item
from fxlib.spec.contract import Contract
from fxlib.v1 import graph_pb2 as pb
from tests.wire.spoiled import refusal
from tests.wire.support import graph_of, round_trip

READ = Contract(reads=frozenset({"tables"}), batchable=True, batched_by="my.ps:many")


def batched(graph: Graph, x: Node) -> Any:
    calls: tuple[Any, ...] = (("my.ps:lookup", (x, 1), {"k": x}), ("my.ps:count", (), {}))
    batch = graph.call_function(issue_batch, ("ps0", calls, 1.5, "my.ps:many"))
    waits = [graph.call_function(wait_item, (batch, place)) for place in range(2)]
    for place, wait in enumerate(waits):
        wait.meta.update(call=f"call_{place}", contract=READ, order=place)
    return tuple(waits)


def encoded() -> tuple[pb.Graph, list[pb.Node]]:
    graph = wire.encode(graph_of(batched)).graph
    return graph, list(graph.modules[-1].graph.nodes)


def test_a_batch_comes_back_with_all_its_calls_and_their_contracts() -> None:
    module: GraphModule = round_trip(graph_of(batched))
    x, batch, *waits, _ = module.graph.nodes
    assert batch.target is issue_batch
    assert batch.args == ("ps0", (("my.ps:lookup", (x, 1), {"k": x}), ("my.ps:count", (), {})), 1.5, "my.ps:many")
    assert [wait.args for wait in waits] == [(batch, 0), (batch, 1)]
    assert [(wait.target, wait.meta["call"], wait.meta["contract"], wait.meta["order"]) for wait in waits] == [
        (wait_item, "call_0", READ, 0),
        (wait_item, "call_1", READ, 1),
    ]


def test_what_is_no_batch_is_refused() -> None:
    def changed(spoil: Any) -> str:
        graph, nodes = encoded()
        spoil(nodes)
        return str(refusal(graph))

    def first_call(nodes: list[pb.Node]) -> pb.Value:
        return nodes[1].args[1].tuple.items[0]

    refused = {
        "no module": lambda nodes: setattr(first_call(nodes).tuple.items[0], "text", "eval"),
        "a method": lambda nodes: setattr(first_call(nodes).tuple.items[0], "text", ".forward"),
        "no arguments": lambda nodes: first_call(nodes).tuple.items.pop(),
        "no calls": lambda nodes: nodes[1].args[1].tuple.ClearField("items"),
        "a list": lambda nodes: nodes[1].args[1].list.SetInParent(),
        "no form": lambda nodes: setattr(nodes[1].args[3], "text", "os.system"),
        "too few arguments": lambda nodes: nodes[1].args.pop(),
        "keywords": lambda nodes: nodes[1].kwargs.add(name="to").value.SetInParent(),
        "later": lambda nodes: setattr(first_call(nodes).tuple.items[1].tuple.items[0], "node", 3),
    }
    for spoil in refused.values():
        assert "node 'issue_batch'" in changed(spoil)


@pytest.mark.parametrize("index", [2, -1, "0", 1.0, None])
def test_what_waits_for_no_call_of_a_batch_is_refused(index: object) -> None:
    module = graph_of(batched)
    next(node for node in module.graph.nodes if node.target is wait_item).args = (_batch(module), index)
    assert "does not wait for a call of a batch" in str(refusal(_structure(module)))


def test_only_batches_are_waited_for_by_item() -> None:
    def wrong(graph: Graph, x: Node) -> Any:
        return graph.call_function(wait_item, (graph.call_function(torch.relu, (x,)), 0))

    assert "does not wait for a call of a batch" in str(refusal(_structure(graph_of(wrong))))


def _batch(module: GraphModule) -> Node:
    return next(node for node in module.graph.nodes if node.target is issue_batch)


def _structure(module: GraphModule) -> pb.Graph:
    return wire.encode(module).graph
