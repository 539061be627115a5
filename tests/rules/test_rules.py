"""Where rules are applied, in which order, and what they put in."""

# ruff: noqa: PLW0108 - a side of a rule names its inputs

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import symbolic_trace
from torch.fx.subgraph_rewriter import replace_pattern
from torch.nn import functional as F

from fxlib import Rule
from tests.rules.rule_programs import X, Y, found, is_same, ruled, targets, why_not

ONCE = Rule(lambda x: torch.relu(torch.relu(x)), lambda x: x.clamp(min=0), name="relu_once")


def test_overlapping_matches_are_taken_in_program_order() -> None:
    rule = Rule(lambda x: torch.exp(torch.exp(x)), lambda x: torch.sin(x))
    rewrite = ruled(lambda x, y: torch.exp(torch.exp(torch.exp(x))) + torch.exp(torch.exp(y)), rule)
    assert targets(rewrite) == ["sin", "exp", "sin", "add"]
    assert found(rewrite) == 2


def test_a_single_node_is_a_pattern() -> None:
    rule = Rule(lambda x: torch.exp(x), lambda x: torch.sin(x))
    assert targets(ruled(lambda x, y: torch.exp(torch.exp(x)) + y, rule)) == ["sin", "sin", "add"]


def test_what_a_pattern_computes_for_nothing_is_not_looked_for() -> None:
    def pattern(x: Tensor) -> Tensor:
        torch.sigmoid(x)
        return torch.exp(x)

    assert targets(ruled(lambda x, y: torch.exp(x) + y, Rule(pattern, lambda x: torch.sin(x)))) == ["sin", "add"]


def test_a_pattern_may_have_several_results() -> None:
    rule = Rule(lambda x, y: (x + y, x - y), lambda x, y: (torch.add(y, x), torch.sub(x, y)))

    def program(x: Tensor, y: Tensor) -> Tensor:
        difference = x - y
        return (x + y) * difference.exp()

    rewrite = ruled(program, rule, bitwise=True)
    assert found(rewrite) == 1
    assert is_same(program, rewrite)


def test_several_results_used_before_the_last_is_there_are_given_early() -> None:
    rule = Rule(lambda x: (torch.sin(x), torch.cos(x)), lambda x: (torch.sin(x) * 1, torch.cos(x) * 1))

    def program(x: Tensor, y: Tensor) -> Tensor:
        early = torch.sin(x) + y
        return torch.cos(x) * early

    rewrite = ruled(program, rule)
    assert targets(rewrite) == ["sin", "mul", "cos", "mul", "add", "mul"]
    assert is_same(program, rewrite)


def test_results_whose_places_exclude_one_another_are_left_alone() -> None:
    rule = Rule(lambda x, y: (torch.cos(x), torch.exp(x) + y), lambda x, y: (torch.cos(x), y + torch.exp(x)))

    def program(x: Tensor, _: Tensor) -> Tensor:
        return torch.exp(x) + torch.cos(x).sum()

    assert why_not(ruled(program, rule)) == ["USED_BEFORE"]


def test_a_value_from_within_may_not_be_used_elsewhere() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        inner = torch.relu(x)
        return torch.relu(inner) + inner * y

    rewrite = ruled(program, ONCE)
    assert why_not(rewrite) == ["USED_OUTSIDE"]
    assert targets(rewrite) == ["relu", "relu", "mul", "add"]


def test_another_reading_is_tried_where_the_first_is_declined() -> None:
    rule = Rule(lambda x, y: torch.exp(x) + y, lambda x, y: torch.add(y, torch.exp(x)))

    def program(x: Tensor, y: Tensor) -> Tensor:
        shared, own = torch.exp(x), torch.exp(y)
        return (shared + own) * shared

    rewrite = ruled(program, rule, bitwise=True)
    assert found(rewrite) == 1
    assert is_same(program, rewrite)


def test_a_value_that_is_used_twice_in_the_pattern_is_one_value() -> None:
    rule = Rule(lambda x: x * torch.sigmoid(x), lambda x: F.silu(x))
    rewrite = ruled(lambda x, y: x * torch.sigmoid(x) + x * torch.sigmoid(y), rule)
    assert targets(rewrite) == ["silu", "sigmoid", "mul", "add"]


def test_rules_are_applied_one_after_another() -> None:
    first = Rule(lambda x: torch.sin(x), lambda x: torch.exp(x))
    then = Rule(lambda x: torch.exp(torch.exp(x)), lambda x: torch.cos(x))
    assert targets(ruled(lambda x, y: torch.exp(torch.sin(x)) + y, first, then)) == ["cos", "add"]


def test_rounds_go_on_until_nothing_is_found() -> None:
    halves = Rule(lambda x: torch.neg(torch.neg(x)), lambda x: torch.clone(x))
    through = Rule(lambda x: torch.neg(torch.clone(x)), lambda x: torch.neg(x))

    def program(x: Tensor, y: Tensor) -> Tensor:
        return x.neg().neg().neg().neg().neg() + y

    assert targets(ruled(program, halves, through)) == ["clone", "neg", "add"]
    assert targets(ruled(program, halves, through, rounds=10)) == ["neg", "add"]


def test_a_guard_has_the_last_word() -> None:
    seen = []

    def guard(match: Any) -> bool:
        seen.append((list(match.inputs), [node.name for node in match.nodes]))
        return False

    rule = Rule(lambda x: torch.exp(x), lambda x: torch.sin(x), guard=guard)
    assert why_not(ruled(lambda x, y: torch.exp(x) + y, rule)) == ["GUARD"]
    assert seen == [(["x"], ["exp"])]


def test_named_guards_speak_of_gradients_and_uses() -> None:
    quiet = Rule(lambda x: torch.exp(x), lambda x: torch.sin(x), "without_gradients")
    assert found(ruled(lambda x, y: torch.exp(x) + y, quiet)) == 0
    with torch.no_grad():
        assert found(ruled(lambda x, y: torch.exp(x) + y, quiet)) == 1
    once = Rule(lambda x: torch.exp(x), lambda x: torch.sin(x), "inputs_used_once")
    assert found(ruled(lambda x, y: torch.exp(x) + torch.exp(y) + y, once)) == 1


def test_what_is_put_in_stands_at_the_place_of_what_it_replaces() -> None:
    rewrite = ruled(lambda x, y: torch.relu(torch.relu(x)) + y, ONCE)
    (made,) = (node for node in rewrite.module.graph.nodes if node.target == "clamp")
    assert __file__ in made.meta["source"]


def test_stock_replaces_across_a_write_and_ours_does_not() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        value = x * 2
        first = torch.exp(value)
        value.mul_(3)
        return torch.sin(first) + value + y

    rule = Rule(lambda x: torch.sin(torch.exp(x)), lambda x: torch.sin(torch.exp(x)))
    rewrite = ruled(program, rule)
    assert why_not(rewrite) == ["VALUE_WRITTEN"]
    stock = symbolic_trace(program, concrete_args=None)
    replace_pattern(stock, lambda x: torch.sin(torch.exp(x)), lambda x: torch.sin(torch.exp(x)))
    assert not torch.equal(stock(X.clone(), Y.clone()), program(X.clone(), Y.clone()))  # so much for the trap
    assert is_same(program, rewrite)
