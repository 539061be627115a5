"""Programs of any size for one pass each, in which it finds something to do in every few nodes."""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

HELD = 8
"""How many weights there are, which are used in turn."""


def constants(size: int) -> GraphModule:
    """Return about `size` nodes: of every five, three compute the same from a buffer in each forward."""
    root, graph = nn.Module(), Graph()
    for place in range(HELD):
        root.register_buffer(f"weight_{place}", torch.eye(4))
    x = graph.placeholder("x")
    for place in range(size // 5):
        weight = graph.call_function(torch.ops.aten.t.default, (graph.get_attr(f"weight_{place % HELD}"),))
        weight = graph.call_function(torch.ops.aten.mul.Tensor, (weight, 0.5 + place))
        weight = graph.call_function(torch.ops.aten.tanh.default, (weight,))
        x = graph.call_function(torch.ops.aten.mm.default, (x, weight))
    return _module(root, graph, x)


def convolutions(size: int) -> GraphModule:
    """Return about `size` nodes: convolutions, each with a batch norm and a ReLU after it."""
    root, graph = nn.Module(), Graph()
    x = graph.placeholder("x")
    for place in range(size // 3):
        root.add_module(f"convolution_{place}", nn.Conv2d(2, 2, 3, padding=1))
        root.add_module(f"norm_{place}", nn.BatchNorm2d(2))
        x = graph.call_module(f"norm_{place}", (graph.call_module(f"convolution_{place}", (x,)),))
        x = graph.call_function(F.relu, (x,))
    return _module(root, graph, x)


def repeats(size: int) -> GraphModule:
    """Return about `size` nodes without gradients: of every five, two repeat what two others have done."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["requires_grad"] = False
    for _ in range(size // 5):
        one, other = (
            graph.call_function(
                torch.ops.aten.mul.Tensor, (graph.call_function(torch.ops.aten.tanh.default, (x,)), 2.0)
            )
            for _ in range(2)
        )
        x = graph.call_function(torch.ops.aten.add.Tensor, (one, other))
    return _module(nn.Module(), graph, x)


def activations(size: int) -> GraphModule:
    """Return about `size` nodes: of every four, one is a GELU, and two are a SiLU written out."""
    graph = Graph()
    x = graph.placeholder("x")
    for _ in range(size // 4):
        x = graph.call_function(F.gelu, (x,))
        x = graph.call_function(operator.mul, (x, graph.call_function(torch.sigmoid, (x,))))
        x = graph.call_function(torch.tanh, (x,))
    return _module(nn.Module(), graph, x)


def _module(root: nn.Module, graph: Graph, result: torch.fx.Node) -> GraphModule:
    graph.output(result)
    return GraphModule(root, graph).eval()
