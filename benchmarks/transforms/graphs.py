"""Programs of any size, for what is measured against the number of nodes, and the functional graphs of models.

A chain of work of all kinds makes a remote call in every hundred nodes; other graphs serve one pass each, which finds
something to do in every few nodes; functional graphs of ATen operators are chains, or those of models that nobody here
wrote.
"""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import rpc
from torch.func import functional_call, functionalize
from torch.fx import Graph, GraphModule, Node, wrap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import Argument
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fxlib import ps
from fxlib.analysis.operators.in_place import SCATTERS

CALL_EVERY = 100
SERVERS = 4


class Chain(nn.Module):
    """Functions, methods, modules and writes in place; what a remote call returns joins them 50 nodes later.

    Args:
        size: nodes, inputs and output left out.
        unused_every: of how many nodes one makes a value that nobody uses; 0 for none.
    """

    def __init__(self, size: int, *, unused_every: int = 0) -> None:
        super().__init__()
        self.size, self.unused_every = size, unused_every
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pending = x
        for place in range(self.size):
            if place % CALL_EVERY == 0:
                pending = self.rows(f"ps{place // CALL_EVERY % SERVERS}", ids)
            elif place % CALL_EVERY == CALL_EVERY // 2:
                x = x + pending
            elif self.unused_every and place % self.unused_every == 1:
                torch.exp(x)
            else:
                x = self.work(place, x)
        return x

    def rows(self, server: str, ids: torch.Tensor) -> torch.Tensor:
        """Look rows up on a server."""
        found: torch.Tensor = rpc.rpc_sync(server, ps.lookup, args=("rows", ids))
        return found

    def work(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """One node."""
        if place % 5 == 0:
            return self.layers[place % 8](x)
        if place % 5 == 1:
            return x.view(-1, 4)
        if place % 5 == 2:
            return torch.add(x, x, alpha=0.5)
        return F.relu(x, inplace=True) if place % 5 == 3 else torch.tanh(x)


class StockChain(Chain):
    """The same for `symbolic_trace`, which runs remote calls where it should record them: in a function kept whole."""

    def rows(self, server: str, ids: torch.Tensor) -> torch.Tensor:
        return lookup(server, ids)


@wrap
def lookup(server: str, ids: torch.Tensor) -> torch.Tensor:
    """Make one blocking remote call."""
    found: torch.Tensor = rpc.rpc_sync(server, ps.lookup, args=("rows", ids))
    return found


HELD = 8
"""Number of weights, which are used in turn."""


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


aten = torch.ops.aten
SHAPE = (8, 8)


def functional_chain(size: int) -> GraphModule:
    """Return about `size` nodes: chains of operators, residual sums, and what is left of writes to a row."""
    graph = Graph()
    with FakeTensorMode():
        whole, row = torch.empty(SHAPE), torch.empty(SHAPE)[0]
    values = {2: whole, 1: row}

    def call(target: torch._ops.OpOverload[..., torch.Tensor], *args: Argument, rank: int = 2) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = values[rank]
        return node

    value = graph.placeholder("x")
    value.meta["val"] = whole
    for _ in range(size // 8):
        kept = call(aten.sin.default, value)
        value = call(aten.mul.Tensor, kept, 0.5)
        value = call(aten.add.Tensor, call(aten.relu.default, value), kept)
        part = call(aten.mul.Tensor, call(aten.select.int, value, 0, 0, rank=1), 2.0, rank=1)
        value = call(aten.select_scatter.default, value, part, 0, 0)
        value = call(aten.sigmoid.default, value)
    graph.output(value)
    return GraphModule({}, graph)


def functional_graph(model: nn.Module, *inputs: torch.Tensor) -> tuple[GraphModule, tuple[torch.Tensor, ...]]:
    """Return the functional graph of a model's forward without gradients, and what it takes: state, then inputs."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def forward(*given: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            result = functional_call(model, dict(zip(state, given, strict=False)), given[len(state) :])
        return [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]  # caches stay behind

    flat = (*(each.detach().clone() for each in state.values()), *inputs)
    try:
        return make_fx(functionalize(forward), tracing_mode="fake")(*flat), flat
    except GuardOnDataDependentSymNode:
        # Some models ask whether they are being traced, and do not see it through `functionalize`.
        traced = make_fx(forward, tracing_mode="fake")(*flat)
        return make_fx(functionalize(traced), tracing_mode="fake")(*flat), flat


def copying(module: GraphModule) -> int:
    """Count what is left to reuse memory for: scatters, less the operators that write to an argument already."""
    targets = [node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return sum(each in SCATTERS for each in targets) - sum(each._schema.is_mutable for each in targets)


def reused(before: GraphModule, after: GraphModule) -> int:
    """Count operators that write now, and scatters that are gone."""
    return copying(before) - copying(after)
