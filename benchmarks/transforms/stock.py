"""Torch's own transforms, each prepared on a copy of a program and then run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.constant_folding import constant_fold
from torch.fx import GraphModule
from torch.fx.experimental.optimization import fuse
from torch.fx.passes import reinplace as torch_reinplace
from torch.fx.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops
from torch.fx.subgraph_rewriter import replace_pattern
from torch.nn import functional as F

Run = Callable[[], GraphModule]
Stock = Callable[[GraphModule, Sequence[torch.Tensor]], Run]
"""Copies a program, which has sample inputs, and returns what transforms the copy."""


def on_copy(transform: Callable[[GraphModule], object]) -> Stock:
    """Return one that works on a deep copy in place, or returns another module."""

    def prepare(module: GraphModule, _: Sequence[torch.Tensor]) -> Run:
        copied = copy.deepcopy(module)

        def run() -> GraphModule:
            made = transform(copied)
            return made if isinstance(made, GraphModule) else copied

        return run

    return prepare


def reinplace(module: GraphModule, inputs: Sequence[torch.Tensor]) -> Run:
    """`torch.fx.passes.reinplace`, which propagates shapes first."""
    copied = copy.deepcopy(module)
    return lambda: torch_reinplace.reinplace(copied, *inputs)


def common_subexpressions(module: GraphModule) -> GraphModule:
    """Run `CSEPass`, told of its own list of operators to leave alone."""
    found = CSEPass(get_CSE_banned_ops())(module)
    return module if found is None else found.graph_module


def fold_norms(module: GraphModule) -> GraphModule:
    """`torch.fx.experimental.optimization.fuse`, without the trace and the copy of the model."""
    fused: GraphModule = fuse(module, inplace=True, no_trace=True)  # type: ignore[assignment]
    return fused


def rewrite(module: GraphModule, pattern: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """`torch.fx.subgraph_rewriter`."""
    replace_pattern(module, pattern, replacement)


class Decomposition(fx.Transformer):
    """`torch.fx.Transformer`, with a rule for one operator."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Trace what the operator is made of."""
        if target is F.gelu:
            (x,) = args
            return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))
        return super().call_function(target, args, kwargs)


def decompose(module: GraphModule) -> GraphModule:
    """Retrace the program with it."""
    return Decomposition(module).transform()


def channels_last(module: GraphModule) -> GraphModule:
    """`Module.to(memory_format=...)`, which lays out weights, and leaves the program to them."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def dead_code(module: GraphModule) -> None:
    """Run `Graph.eliminate_dead_code`."""
    module.graph.eliminate_dead_code()


def fold_constants(module: GraphModule) -> None:
    """Run `torch._inductor.constant_folding`."""
    constant_fold(module)
