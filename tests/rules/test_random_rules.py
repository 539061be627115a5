"""Random programs compute the same, to the bit, with rules that keep every bit."""

# ruff: noqa: PLW0108 - a side of a rule names its inputs

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, reject, settings
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

import fxlib
from fxlib import Rule
from fxlib.errors import PassError
from tests.rules.rule_programs import X, Y, ruled
from tests.shared.many import many

BITWISE = (
    Rule(lambda x, y: x + y, lambda x, y: y + x, name="swap"),
    Rule(lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(x), name="once"),
    Rule(lambda x: torch.neg(torch.neg(x)), lambda x: torch.clone(x), name="twice"),
    Rule(lambda x, y: (x * y, x - y), lambda x, y: (y * x, torch.sub(x, y)), name="both"),
)
WITHOUT_GRADIENTS = (
    *BITWISE,
    Rule(lambda x: x * 1, lambda x: x, name="times one"),
    Rule(lambda x: torch.clone(x), lambda x: x, name="no copy"),
    Rule(lambda x: x.t(), lambda x: x.t().clone(), name="no view"),
    Rule(lambda x, y: (torch.clone(x), x + y), lambda x, y: (x, torch.add(x, y)), name="some copy"),
)


@st.composite
def _programs(draw: st.DrawFn) -> Graph:
    """Programs full of what the rules look for, with views, writes in place, modes and noise between."""
    graph = Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for _ in range(draw(st.integers(2, 16))):
        one, other = draw(st.sampled_from(values[-5:])), draw(st.sampled_from(values))
        values.append(_drawn(draw, graph, one, other))
    graph.output(tuple(values[draw(st.integers(2, len(values) - 1)) :]))
    return graph


def _drawn(draw: st.DrawFn, graph: Graph, one: Node, other: Node) -> Node:
    kind = draw(st.sampled_from(("relu", "neg", "add", "both", "view", "write", "noise", "copy", "one")))
    if kind == "relu":
        return graph.call_function(draw(st.sampled_from((torch.relu, F.relu, torch.ops.aten.relu.default))), (one,))
    if kind == "neg":
        return graph.call_method("neg", (one,)) if draw(st.booleans()) else graph.call_function(torch.neg, (one,))
    if kind == "add":
        return graph.call_function(torch.add, (one,), {"other": other})
    if kind == "both":
        product = graph.call_function(torch.mul, (one, other))
        return graph.call_function(torch.sub, (one, other)) if draw(st.booleans()) else product
    if kind == "write":
        own = one.op != "placeholder" and one.target != "t"  # autograd lets nobody write to a leaf
        written = one if own and draw(st.booleans()) else graph.call_function(torch.clone, (one,))
        graph.call_method("mul_", (written, 0.5))
        return written
    if kind == "view":
        return graph.call_method("t", (one,))
    if kind == "noise":
        return graph.call_function(
            torch.rand, (4, 4)
        )  # `rand_like` goes by strides, and sums by those of either operand
    return graph.call_function(torch.mul, (one, 1)) if kind == "one" else graph.call_method("clone", (one,))


def _check(graph: Graph, rules: tuple[Rule, ...], *, grad: bool) -> None:
    torch.manual_seed(0)  # noise goes on from where the tests before have left it otherwise
    model = GraphModule(nn.Module(), graph)
    rewrite = ruled(model, *rules, bitwise=True)
    rewritten = GraphModule(nn.Module(), rewrite.module.graph)
    inputs = [X.clone(), Y.clone()]
    if any(each.isnan().any() for each in model(X.clone(), Y.clone())):  # of two NaNs, the first operand's is the sum
        reject()
    if grad:
        inputs = [each.requires_grad_() for each in inputs]
    try:
        same = fxlib.verify(model, rewritten, inputs, grad=grad)
    except PassError:  # the program itself has no backward: it writes to what that needs
        reject()
    # A sum is laid out as its first operand, and rules take what commutes in either order.
    apart = [each for each in same.differences if not each.where.startswith("form of ")]
    assert not apart, f"{same}\n{model.code}\n{rewritten.code}"


@pytest.mark.slow
@given(graph=_programs())
@settings(deadline=None, max_examples=many(60))
def test_random_programs_keep_outputs_and_mutations(graph: Graph) -> None:
    with torch.no_grad():
        _check(graph, WITHOUT_GRADIENTS, grad=False)


@pytest.mark.slow
@given(graph=_programs())
@settings(deadline=None, max_examples=many(40))
def test_random_programs_keep_gradients(graph: Graph) -> None:
    _check(graph, BITWISE, grad=True)
