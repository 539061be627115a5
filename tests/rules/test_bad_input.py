"""What is no rule is refused when it is made, and says where and why."""

# ruff: noqa: A006, PLW0108 - a side of a rule names its inputs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.nn import functional as F
from typing_extensions import override

import fxlib
from fxlib import Rule
from fxlib.errors import PassError
from fxlib.passes import RewriteRules
from tests.rules.rule_programs import Program, ruled


def _written_aside(x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    y.mul_(x)
    return y


def _written_out(x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    torch.mul(x, x, out=y)
    return y


def _drawn_aside(x: Tensor) -> Tensor:
    x.bernoulli()
    return torch.sigmoid(x)


class _Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign; its forward makes no node."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


_reversed: Callable[[Tensor], Tensor] = _Reversed.apply


def _within(block: Any) -> Callable[[Tensor], Tensor]:
    """Return a function a part of which runs in a block."""

    def within(x: Tensor) -> Tensor:
        with block:
            y = x.exp()
        return y * x

    return within


LOST: dict[str, tuple[Callable[..., Any], str]] = {
    "no_grad": (_within(torch.no_grad()), "turns gradients off"),
    "no_grad around all": (torch.no_grad()(lambda x: x.exp()), "turns gradients off"),
    "inference_mode": (_within(torch.inference_mode()), "turns gradients off"),
    "set_grad_enabled": (lambda x: (torch.set_grad_enabled(False), x.exp())[1], "turns gradients off"),
    "autocast": (_within(torch.autocast("cpu", torch.bfloat16)), "enters autocast"),
    "autocast that is off": (_within(torch.autocast("cpu", enabled=False)), "enters autocast"),
    "a function with its own backward": (lambda x: _reversed(x.exp()), "_Reversed, a torch.autograd.Function"),
}
"""Snippets whose nodes would lose what is written around them."""


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", LOST)
def test_a_side_that_its_nodes_do_not_tell_whole_is_refused(case: str, around: Callable[[], Any]) -> None:
    lossy, words = LOST[case]
    with around():
        with pytest.raises(PassError, match=rf"rule 'mine', pattern.*{words}"):
            Rule(lossy, lambda x: x.exp(), name="mine")
        with pytest.raises(PassError, match=rf"rule 'mine', replacement.*{words}"):
            Rule(lambda x: x.exp(), lossy, name="mine")
        assert torch.is_grad_enabled() is (around is torch.enable_grad)


BAD: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "empty": (lambda x: x, lambda x: x, "computes nothing"),
    "unused input": (lambda x, y: x + 1, lambda x, y: x + y, "does not use its input 'y'"),
    "unknown input": (lambda x: x + 1, lambda x, y: x + y, r"unknown input, 'y'.*takes \(x\).*\(x, y\)"),
    "other inputs": (lambda x, y: x + y, lambda y, x: x + y, r"takes \(x, y\), the replacement \(y, x\)"),
    "fewer inputs": (lambda x, y: x + y, lambda x: x + 1, r"takes \(x, y\), the replacement \(x\)"),
    "other outputs": (lambda x: (x.exp(), x.sin()), lambda x: x.exp(), "returns 2 value"),
    "any inputs": (lambda *x: torch.cat(x), lambda *x: torch.cat(x), "a variable number of inputs|cannot be traced"),
    "in two parts": (lambda x, y: (x.exp(), y.sin()), lambda x, y: (x, y), "consists of parts"),
    "an input returned": (lambda x: (x, x.exp()), lambda x: (x, x.exp()), "returns an input"),
    "a value returned twice": (lambda x: (x.exp(),) * 2, lambda x: (x, x), "returns one value twice|returns"),
    "a write": (lambda x: x.add_(1), lambda x: x + 1, "add_, which writes"),
    "a write in the replacement": (lambda x: x.exp(), lambda x: x.exp_(), "replacement.*exp_, which writes"),
    "a write whose result nobody takes": (lambda x: x.exp(), _written_aside, "mul_, which writes"),
    "a write whose result nobody takes in the pattern": (_written_aside, lambda x: x.exp(), "mul_, which writes"),
    "a write to out=": (lambda x: x.exp(), _written_out, "calls mul, which writes"),
    "noise that nobody takes": (lambda x: x.exp(), _drawn_aside, "draws random numbers"),
    "noise": (lambda x: F.dropout(x), lambda x: x, "draws random numbers"),
    "no operator": (lambda x: x.no_such_method(), lambda x: x, "effects are unknown|cannot be traced"),
    "an `if`": (lambda x: x.exp() if x.sum() > 0 else x, lambda x: x, "cannot be traced"),
    "a number": (lambda x: x.exp(), lambda x: 3, "returns 3"),
    "a tensor": (lambda x: x + torch.ones(2), lambda x: x, "holds a tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_rule_is_refused(case: str) -> None:
    pattern, replacement, words = BAD[case]
    with pytest.raises(PassError, match=words) as refused:
        Rule(pattern, replacement, name="mine")
    assert "rule 'mine'" in str(refused.value)
    assert "test_bad_input.py:" in str(refused.value)


def test_work_that_no_output_needs_is_no_part_of_a_rule() -> None:
    def with_more(x: Tensor) -> Tensor:
        x.sin()
        torch.cos(x)
        return x.exp()

    rule = Rule(with_more, with_more, name="mine")
    assert [[node.target for node in side.nodes] for side in (rule.seeks, rule.gives)] == [["exp"], ["exp"]]


def test_a_module_with_weights_is_no_part_of_a_rule() -> None:
    with pytest.raises(PassError, match="calls the module '0', a Linear"):
        Rule(symbolic_trace(nn.Sequential(nn.Linear(2, 2))), lambda input: input)


def test_a_graph_without_a_result_is_no_part_of_a_rule() -> None:
    graph = Graph()
    graph.call_function(torch.exp, (graph.placeholder("x"),))
    with pytest.raises(PassError, match=r"pattern.*returns nothing"):
        Rule(GraphModule(nn.Module(), graph), lambda x: x.exp(), name="empty")


def test_a_guard_that_nobody_registered_is_refused() -> None:
    with pytest.raises(PassError, match=r"no guard is called 'mine'.*without_gradients"):
        Rule(lambda x: x.exp(), lambda x: x.sin(), guard="mine")


def test_a_guard_is_a_function_or_a_name_and_an_exception_says_whose_it_is() -> None:
    bad: Any = 3
    with pytest.raises(PassError, match=r"rule 'mine': its guard is 3"):
        Rule(lambda x: x.exp(), lambda x: x.sin(), guard=bad, name="mine")
    rule = Rule(lambda x: x.exp(), lambda x: x.sin(), guard=lambda match: 1 // 0 > 0, name="mine")
    with pytest.raises(ZeroDivisionError) as raised:
        ruled(lambda x, y: x.exp() + y, rule)
    assert raised.value.__notes__[0] == "The guard of the rule 'mine' was running."


def test_a_pattern_that_is_found_in_its_own_replacement_does_not_go_on_for_ever() -> None:
    rule = Rule(lambda x, y: x + y, lambda x, y: y + x, name="swap")
    assert ruled(lambda x, y: x + y, rule).passes[0].changes == 1
    with pytest.raises(PassError, match=r"rule 'swap', node 'add'.*its own replacement, without end"):
        RewriteRules(rules=(rule,), rounds=5)


def test_rules_that_undo_one_another_end_with_an_error_that_names_the_place() -> None:
    there = Rule(lambda x: torch.exp(x), lambda x: torch.sin(x), name="there")
    back = Rule(lambda x: torch.sin(x), lambda x: torch.exp(x), name="back")
    graph = fxlib.capture(Program(lambda x, y: torch.exp(x) + y))
    code = graph.code
    with pytest.raises(PassError, match=r"rule 'back', node 'sin\w*' \(.*test_bad_input.py:\d+\).* after 7 rounds"):
        ruled(graph, there, back, rounds=7)
    assert graph.code == code


def test_rules_that_let_a_program_grow_for_ever_end_with_an_error() -> None:
    there = Rule(lambda x: torch.exp(x), lambda x: torch.sin(torch.sin(x)), name="there")
    back = Rule(lambda x: torch.sin(x), lambda x: torch.exp(torch.exp(x)), name="back")
    with pytest.raises(PassError, match=r"rule '\w+', node .*grow beyond \d+ nodes"):
        ruled(lambda x, y: torch.exp(x) + y, there, back, rounds=100)


@pytest.mark.parametrize(
    "options", [{"rounds": 0}, {"rounds": 1.5}, {"rules": [lambda x: x]}, {"rules": 1.5}, {"speed": 1}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PassError, match="rewrite_rules"):
        fxlib.recipes.recipes.from_passes([("rewrite_rules", options)])
