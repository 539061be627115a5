"""What long programs take grows with their nodes."""

# ruff: noqa: PLW0108 - a side of a rule names its inputs

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.subgraph_rewriter import replace_pattern
from torch.nn import functional as F

import fxlib
from fxlib import Rule
from fxlib.passes import Context, RewriteRules
from fxlib.passes.local import rewrite_rules
from fxlib.recipes import recipes
from tests.rules.rule_programs import found, ruled
from tests.shared.undisturbed import undisturbed

SUM = Rule(lambda x, y: x + y, lambda x, y: y + x, name="sum")
BOTH = Rule(lambda x, y: (x + y, x - y), lambda x, y: (y + x, torch.sub(x, y)), name="both")
SILU = Rule(lambda x: x * torch.sigmoid(x), lambda x: F.silu(x), name="silu")


def _program(step: Callable[[Graph, Node, Node], Node], nodes: int) -> GraphModule:
    graph = Graph()
    value = x = graph.placeholder("x")
    while len(graph.nodes) < nodes:
        value = step(graph, x, value)
    graph.output(value)
    return GraphModule(nn.Module(), graph)


def _sum(graph: Graph, x: Node, value: Node) -> Node:
    return graph.call_function(torch.add, (value, x))


def _both(graph: Graph, x: Node, value: Node) -> Node:
    pair = graph.call_function(operator.add, (x, value)), graph.call_function(operator.sub, (x, value))
    return graph.call_function(operator.truediv, pair)


def _silu(graph: Graph, x: Node, value: Node) -> Node:
    gate = graph.call_function(torch.sigmoid, (value,))
    return graph.call_function(operator.add, (graph.call_function(operator.mul, (value, gate)), x))


@pytest.mark.slow
@pytest.mark.parametrize("step,rule", [(_sum, SUM), (_both, BOTH)], ids=["a sum", "several results"])
def test_as_many_steps_as_the_program_has_nodes(
    step: Callable[[Graph, Node, Node], Node], rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []
    stock = rewrite_rules._pairs

    def counted(one: object, other: object) -> object:
        steps.append(one)
        return stock(one, other)

    monkeypatch.setattr(rewrite_rules, "_pairs", counted)

    def compared(nodes: int) -> int:
        steps.clear()
        nowhere = Rule(lambda x, y: x + torch.relu(y), lambda x, y: x)
        assert found(ruled(_program(step, nodes), nowhere, rule)) > nodes // 4
        return len(steps)

    assert compared(2000) < 2.1 * compared(1000)


@pytest.mark.slow
def test_a_node_with_a_thousand_inputs_is_given_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def counted(arguments: Any, change: Callable[[Node], Any]) -> Any:
        given.append(arguments)
        return map_arg(arguments, change)

    monkeypatch.setattr("fxlib.passes.infra.edit.map_arg", counted)
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(torch.exp, (x,)) for _ in range(1000)))
    program = GraphModule(nn.Module(), graph)
    rewrite = ruled(program, Rule(lambda x: torch.exp(x), lambda x: torch.exp(x) * 1, name="times one"))
    assert found(rewrite) == 1000
    assert [len(each[0][0]) for each in given if len(each) == 2 and isinstance(each[0][0], tuple)] == [1000]
    assert fxlib.verify(program, GraphModule(nn.Module(), rewrite.module.graph), [torch.ones(2)])


def test_a_decomposition_is_traced_once_for_all_calls_of_one_kind() -> None:
    traced: list[str] = []

    def gelu(x: Tensor, approximate: str = "none") -> Tensor:
        traced.append(approximate)
        return x * torch.sigmoid(1.702 * x)

    def step(graph: Graph, x: Node, value: Node) -> Node:
        rough = graph.call_function(F.gelu, (value,), {"approximate": "tanh"})
        return graph.call_function(F.gelu, (graph.call_function(torch.add, (rough, x)),))

    recipe = recipes.Recipe(name="mine", passes=(fxlib.decompose({F.gelu: gelu}),))
    assert recipes.apply(_program(step, 300), recipe).passes[0].changes == 200
    assert traced == ["tanh", "none"]


@pytest.mark.slow
@pytest.mark.parametrize("step,rule", [(_both, BOTH), (_silu, SILU)], ids=["several results", "a gate"])
def test_torchs_own_rewriter_takes_longer(step: Callable[[Graph, Node, Node], Node], rule: Rule) -> None:
    program = _program(step, 450)

    def taken_s(rewrite: Callable[[GraphModule], object]) -> float:
        copied = copy.deepcopy(program)
        start = time.thread_time()
        rewrite(copied)
        return time.thread_time() - start

    ours, stock = lambda copied: RewriteRules(rules=(rule,)).run(copied, Context(copied)), partial(_stock, rule)

    def least_s() -> tuple[float, float]:
        pairs = [(taken_s(ours), taken_s(stock)) for _ in range(3)]
        return min(our_s for our_s, _ in pairs), min(stock_s for _, stock_s in pairs)

    our_s, stock_s = undisturbed(least_s, lambda found: found[0] < found[1])
    assert our_s < stock_s


def _stock(rule: Rule, program: GraphModule) -> object:
    return replace_pattern(program, rule.pattern, rule.replacement)
