"""A rule is found wherever the program does what its pattern does, however either of them is written."""

# ruff: noqa: A006, PLW0108 - a side of a rule names its inputs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer, symbolic_trace
from torch.nn import functional as F

import fxlib
from fxlib import Rule
from tests.rules.rule_programs import X, Y, found, is_same, ruled, targets, why_not

Program = Callable[[Tensor, Tensor], Any]
ONCE = Rule(lambda x: torch.relu(torch.relu(x)), lambda x: x.clamp(min=0), name="relu_once")
SUM = Rule(lambda x, y: x + y, lambda x, y: y + x, name="sum")


class Activated(nn.Module):
    """A module, a method and an overload, for one function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ReLU()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x).relu() + F.relu(torch.ops.aten.relu.default(y))


def test_methods_functions_modules_and_overloads_are_one() -> None:
    model = Activated()
    rewrite = ruled(fxlib.capture(model), ONCE)
    assert targets(rewrite) == ["clamp", "clamp", "add"]
    assert fxlib.verify(model, rewrite.module, [X, Y])


SUMS: dict[str, Program] = {
    "an operator": lambda x, y: x + y,
    "a function": lambda x, y: torch.add(x, y),
    "a method": lambda x, y: x.add(y),
    "keywords": lambda x, y: torch.add(other=y, input=x),
    "a default spelt out": lambda x, y: torch.add(x, y, alpha=1),
    "an overload": lambda x, y: torch.ops.aten.add.Tensor(x, y),
    "a number": lambda x, y: x + 1 + y * 0,
    "a number first": lambda x, y: 1 + x + y * 0,
}


@pytest.mark.parametrize("written", SUMS)
def test_a_sum_is_a_sum(written: str) -> None:
    rewrite = ruled(SUMS[written], SUM, bitwise=True)
    assert found(rewrite) == 1 + (written in ("a number", "a number first"))
    assert is_same(SUMS[written], rewrite)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x.add_(y) * 1,
        lambda x, y: x.reshape(x.size(0) + y.size(1), -1),
        lambda x, y: x.reshape(x.shape + y.shape),
        lambda x, y: torch.sub(x, y),
    ],
    ids=["scaled", "in place", "of sizes", "of tuples", "a difference"],
)
def test_what_only_looks_like_a_sum_is_left_alone(program: Program) -> None:
    rule = Rule(lambda x, y: torch.add(x, y), lambda x, y: torch.add(y, x))
    assert found(ruled(program, rule)) == 0


def test_operands_of_what_commutes_stand_in_either_order() -> None:
    rule = Rule(lambda x, y: x + torch.relu(y) * 2, lambda x, y: torch.add(x, torch.relu(y), alpha=2))

    def program(x: Tensor, y: Tensor) -> Tensor:
        return 2 * torch.relu(y) + x

    rewrite = ruled(program, rule)
    assert targets(rewrite) == ["relu", "add"]
    assert is_same(program, rewrite, rtol=1e-6, atol=1e-6)


def test_operands_of_what_does_not_commute_keep_their_order() -> None:
    rule = Rule(lambda x, y: x - torch.relu(y), lambda x, y: x - y.clamp(min=0))
    assert found(ruled(lambda x, y: torch.relu(y) - x, rule)) == 0


def test_literals_are_exact_in_a_pattern_and_stand_for_inputs() -> None:
    exact = Rule(lambda x: x * 2.0, lambda x: x + x)
    assert targets(ruled(lambda x, y: x * 2.0 + y * 3.0 + x * 2, exact)) == ["add", "mul", "add", "mul", "add"]

    def pattern(x: Tensor, n: float) -> Tensor:
        return (x * n) * n

    def replacement(x: Tensor, n: float) -> Tensor:
        return x * n**2

    rewrite = ruled(lambda x, y: x * 3.0 * 3.0 + y * 2 * 2 + x * y * y + x * 3.0 * 4.0, Rule(pattern, replacement))
    assert found(rewrite) == 1


def test_an_input_that_is_annotated_as_a_tensor_is_no_number() -> None:
    def pattern(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def replacement(x: Tensor, y: Tensor) -> Tensor:
        return y * x

    assert found(ruled(lambda x, y: x * 2 + x * y, Rule(pattern, replacement))) == 1


def test_a_literal_is_not_put_where_a_tensor_belongs() -> None:
    rule = Rule(lambda x, y: x - y, lambda x, y: y.sub(x).neg())
    assert why_not(ruled(lambda x, y: (x - 1) * y, rule)) == ["LITERAL_UNFIT"]


def test_overloads_that_mean_something_else_are_something_else() -> None:
    rule = Rule(lambda x, y: torch.max(x, y), lambda x, y: torch.maximum(x, y))
    rewrite = ruled(lambda x, y: torch.max(x, y) + torch.max(x, 1)[0] + torch.max(y), rule)
    assert targets(rewrite).count("maximum") == 1


def _added(x: Tensor, y: Tensor) -> Tensor:
    return x + y


NO_TENSORS: dict[str, tuple[Callable[..., Any], Rule]] = {
    "tuples": (lambda x, y: (x.chunk(2) + x.split(1))[2] * y, Rule(_added, lambda x, y: torch.add(x, y))),
    "a repeated list": (lambda x, y: (x.chunk(2) * 2)[2], Rule(lambda x, y: x * y, lambda x, y: torch.mul(x, y))),
    "an offset": (lambda x, y: x.storage_offset() + 2, Rule(lambda x, y: x + y, lambda x, y: torch.add(x, y))),
    "a version": (lambda x, y: x._version + 2, Rule(lambda x, y: x + y, lambda x, y: torch.add(x, y))),
    "a dimension": (
        lambda x, y: torch.max(x, x.dim() - 1)[0] + y,
        Rule(lambda x, y: torch.max(x, y), lambda x, y: torch.maximum(x, y)),
    ),
}


@pytest.mark.parametrize("case", NO_TENSORS)
def test_what_is_known_to_be_no_tensor_is_not_computed_as_one(case: str) -> None:
    program, rule = NO_TENSORS[case]
    rewrite = ruled(program, rule)
    assert (found(rewrite), why_not(rewrite)) == (0, [])


def test_a_graph_is_a_pattern_and_its_modules_are_functions() -> None:
    pattern = symbolic_trace(nn.Sequential(nn.ReLU(), nn.Sigmoid()))
    replacement = symbolic_trace(lambda input: torch.sigmoid(input))
    assert targets(ruled(lambda x, y: torch.sigmoid(torch.relu(x)) + y, Rule(pattern, replacement))) == [
        "sigmoid",
        "add",
    ]


def test_the_tracer_of_the_program_does_not_matter() -> None:
    graph = Tracer().trace(Activated())
    assert found(ruled(GraphModule(Activated(), graph), ONCE)) == 2


class Doubled(nn.Module):
    """Multiplies by a number, which `torch.export` writes as a call of an overload for tensors."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y


def test_a_number_in_an_exported_program_is_a_number() -> None:
    model = Doubled()
    twice = Rule(lambda x: x * 2, lambda x: x + x, name="twice")
    exported = fxlib.capture(model, sample_inputs=(X, Y), how="export")
    assert torch.ops.aten.mul.Tensor in {node.target for node in exported.graph.nodes}
    rewrite = ruled(exported, twice)
    assert found(rewrite) == 1
    assert fxlib.verify(model, rewrite.module, [X, Y])
