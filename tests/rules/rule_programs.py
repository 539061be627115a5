"""Programs for rewrite rules, and what rules make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxlib
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Rewrite
from fxlib.rules import Rule

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))


class Program(nn.Module):
    """A function as a module."""

    def __init__(self, body: Callable[..., object]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.body(x, y)


def ruled(program: Callable[..., object] | GraphModule, *rules: Rule, **options: Any) -> Rewrite:
    """Apply rules to a program."""
    graph = program if isinstance(program, GraphModule) else fxlib.capture(Program(program))
    return recipes.apply(graph, recipes.from_passes([("rewrite_rules", {"rules": rules, **options})]))


def targets(rewrite: Rewrite) -> list[str]:
    """Return what the program calls."""
    nodes = (node for node in rewrite.module.graph.nodes if node.op.startswith("call"))
    return [getattr(node.target, "__name__", str(node.target)) for node in nodes]


def found(rewrite: Rewrite) -> int:
    """Return how often a rule was applied."""
    return rewrite.passes[-1].changes


def why_not(rewrite: Rewrite) -> list[str]:
    """Return why matches were declined."""
    return [each.reason.name for each in rewrite.passes[-1].declined]


def is_same(program: Callable[..., object], rewrite: Rewrite, **bounds: Any) -> bool:
    """Whether the graph that rules made, and no original behind it, does what the program does."""
    graph = GraphModule(rewrite.module, rewrite.module.graph)
    return bool(fxlib.verify(Program(program), graph, [X.clone(), Y.clone()], **bounds))
