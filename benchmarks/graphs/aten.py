"""Functional graphs of ATen operators: of any size, and of models that nobody here wrote."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from fxlib.analysis.operators.in_place import SCATTERS

aten = torch.ops.aten
SHAPE = (8, 8)


def chain(size: int) -> GraphModule:
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


def of_model(model: nn.Module, *inputs: torch.Tensor) -> tuple[GraphModule, tuple[torch.Tensor, ...]]:
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
