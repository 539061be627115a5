"""ATen graphs of eager functions, or written by hand, reinplaced and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Rewrite

aten = torch.ops.aten
Model = Callable[..., Any]


def functional(model: Model, *inputs: torch.Tensor) -> GraphModule:
    """The functional ATen graph of an eager function."""
    return make_fx(torch.func.functionalize(model), tracing_mode="fake")(*inputs)


def built(build: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """A graph written by hand: `build` gets what adds a node, and the placeholders, and returns the outputs."""
    graph = Graph()
    values = [graph.placeholder(f"x{place}") for place in range(len(inputs))]
    graph.output(build(lambda target, *args, **kwargs: graph.call_function(target, args, kwargs), *values))
    module = GraphModule({}, graph)
    FakeTensorProp(module).propagate(*inputs)
    return module


def reinplaced(module: GraphModule, **options: Any) -> Rewrite:
    with torch.no_grad():
        return recipes.apply(module, recipes.from_passes([("reinplace", options)]))


def written(module: GraphModule) -> list[str]:
    """Names of the operators that write, in order."""
    targets = [node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [target._schema.name.removeprefix("aten::") for target in targets if target._schema.is_mutable]


def reasons(rewrite: Rewrite) -> set[Reason]:
    return {each.reason for each in rewrite.passes[0].declined}


@torch.no_grad()
def same(module: GraphModule, rewrite: Rewrite, *inputs: torch.Tensor) -> bool:
    ours, theirs = [each.clone() for each in inputs], [each.clone() for each in inputs]
    results = [
        torch.utils._pytree.tree_leaves(run(*given)) for run, given in ((module, ours), (rewrite.module, theirs))
    ]
    pairs = zip([*results[0], *ours], [*results[1], *theirs], strict=True)
    return all(one is other or torch.equal(one, other) for one, other in pairs)


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
