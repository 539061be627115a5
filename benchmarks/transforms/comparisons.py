"""Passes, programs for them, and what of torch's does the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F

import fxlib
from benchmarks.transforms import graphs, stock
from fxlib import Rule
from fxlib.passes import (
    ChannelsLast,
    CommonSubexpressions,
    DeadCode,
    Decompose,
    FoldConstants,
    FoldNorms,
    GraphPass,
    Reinplace,
    RewriteRules,
)
from tests.models import zoo

Program = tuple[GraphModule, Sequence[torch.Tensor]]
"""And inputs for it, where a transform asks for them."""

_UNUSED_EVERY = 10


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _fused_silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A pass, a kind of program, and what else does the same."""

    graph: str
    make: Callable[[int], Program]
    """Makes a program of about so many nodes."""
    ours: GraphPass
    stock: stock.Stock
    left: Callable[[GraphModule], int]
    """Counts what there is to do in a program; `changes` is by how much a pass has lowered it."""


def _nodes(module: GraphModule) -> int:
    return len(module.graph.nodes)


def _uses(target: object) -> Callable[[GraphModule], int]:
    return lambda module: sum(node.target is target for node in module.graph.nodes)


def _called(module: GraphModule) -> list[nn.Module]:
    return [module.get_submodule(str(node.target)) for node in module.graph.nodes if node.op == "call_module"]


def _norms(module: GraphModule) -> int:
    return sum(isinstance(each, nn.BatchNorm2d) for each in _called(module))


def _channels_first(module: GraphModule) -> int:
    layers = [each for each in _called(module) if isinstance(each, nn.Conv2d)]
    return sum(not each.weight.is_contiguous(memory_format=torch.channels_last) for each in layers)


def _program(make: Callable[[int], GraphModule], *inputs: torch.Tensor) -> Callable[[int], Program]:
    return lambda size: (make(size), inputs)


def _comparisons() -> tuple[Comparison, ...]:
    return (
        Comparison(
            graph="aten",
            make=_program(graphs.functional_chain, torch.zeros(graphs.SHAPE)),
            ours=Reinplace(),
            stock=stock.reinplace,
            left=graphs.copying,
        ),
        Comparison(
            graph="unused",
            make=_program(lambda size: fxlib.capture(graphs.Chain(size, unused_every=_UNUSED_EVERY))),
            ours=DeadCode(),
            stock=stock.on_copy(stock.dead_code),
            left=_nodes,
        ),
        Comparison(
            graph="repeats",
            make=_program(graphs.repeats),
            ours=CommonSubexpressions(),
            stock=stock.on_copy(stock.common_subexpressions),
            left=_nodes,
        ),
        Comparison(
            graph="constants",
            make=_program(graphs.constants),
            ours=FoldConstants(bitwise=False),
            stock=stock.on_copy(stock.fold_constants),
            left=_nodes,
        ),
        Comparison(
            graph="convolutions",
            make=_program(graphs.convolutions),
            ours=FoldNorms(),
            stock=stock.on_copy(stock.fold_norms),
            left=_norms,
        ),
        Comparison(
            graph="convolutions",
            make=_program(graphs.convolutions),
            ours=ChannelsLast(),
            stock=stock.on_copy(stock.channels_last),
            left=_channels_first,
        ),
        Comparison(
            graph="activations",
            make=_program(graphs.activations),
            ours=RewriteRules(rules=(Rule(_silu, _fused_silu, name="silu"),)),
            stock=stock.on_copy(partial(stock.rewrite, pattern=_silu, replacement=_fused_silu)),
            left=_uses(torch.sigmoid),
        ),
        Comparison(
            graph="activations",
            make=_program(graphs.activations),
            ours=Decompose(operators=("gelu",)),
            stock=stock.on_copy(stock.decompose),
            left=_uses(F.gelu),
        ),
    )


def _of_model(name: str, _: int) -> Program:
    model, inputs = zoo.build(name)
    return graphs.functional_graph(model, *inputs)


def of_model(name: str) -> Comparison:
    """Return the comparison on the functional graph of a model, whose size is its own."""
    return Comparison(
        graph=name, make=partial(_of_model, name), ours=Reinplace(), stock=stock.reinplace, left=graphs.copying
    )


COMPARISONS: Mapping[str, Comparison] = {each.ours.name: each for each in _comparisons()}
"""All comparisons, by the name of the pass."""
