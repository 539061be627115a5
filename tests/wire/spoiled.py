"""A good graph with something of everything, to be spoiled; and the check that it is then refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxlib import wire
from fxlib.errors import WireError
from fxlib.v1 import graph_pb2 as pb

Edit = Callable[[pb.Graph, pb.Node], Any]


def whole() -> pb.Graph:
    """A graph with something of everything."""
    root: Any = nn.Module()
    root.part, root.weight, root.scale = nn.LSTM(3, 3), nn.Parameter(torch.ones(3)), 2.0

    def build(graph: Graph, x: Node) -> Node:
        weight, scale = graph.get_attr("weight"), graph.get_attr("scale")
        y = graph.call_method("view", (graph.call_function(torch.add, (x, weight), {"alpha": scale}), -1, 3))
        return graph.call_function(getattr, (graph.call_module("part", (y,)), "shape"))

    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return wire.encode(GraphModule(root, graph)).graph


def node_of(graph: pb.Graph, op: int) -> pb.Node:
    return next(node for node in graph.modules[-1].graph.nodes if node.op == op)


def target_of(graph: pb.Graph, op: int) -> pb.Target:
    return graph.targets[node_of(graph, op).target]


def refusal(graph: pb.Graph, **limits: int) -> WireError:
    """Both doors are shut, and say the same."""
    with pytest.raises(WireError) as first:
        wire.validate(graph, wire.Limits(**limits))
    with pytest.raises(WireError) as second:
        wire.decode(graph, limits=wire.Limits(**limits))
    assert str(first.value) == str(second.value)
    return first.value
