"""A rule is not applied where the effects model says that somebody could tell."""

# ruff: noqa: PLW0108 - a side of a rule names its inputs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc

import fxlib
from fxlib import Rule
from tests.rules.rule_programs import X, found, is_same, ruled, why_not

CHAIN = Rule(lambda x: torch.sin(torch.exp(x)), lambda x: torch.sin(torch.exp(x) * 1), name="chain")
SAME = Rule(lambda x: x * 1, lambda x: x, name="same")
FLAT = Rule(lambda x: x.view(-1), lambda x: x.reshape(-1).clone(), name="flat")


def _written_between(x: Tensor, y: Tensor) -> Tensor:
    value = x + y
    risen = torch.exp(value)
    value.mul_(2)
    return torch.sin(risen) + value


def _written_through_a_view(x: Tensor, y: Tensor) -> Tensor:
    value = x + y
    risen = torch.exp(value)
    value.view(-1)[0:2].zero_()
    return torch.sin(risen) + value


def _written_result(x: Tensor, y: Tensor) -> Tensor:
    risen = torch.exp(x)
    turned = torch.sin(risen)
    turned.add_(y)
    return turned


def _mode_between(x: Tensor, y: Tensor) -> Tensor:
    risen = torch.exp(x)
    with torch.no_grad():
        turned = torch.sin(risen)
    return turned + y


@pytest.mark.parametrize(
    "program,reason",
    [
        (_written_between, "VALUE_WRITTEN"),
        (_written_through_a_view, "VALUE_WRITTEN"),
        (_mode_between, "OPAQUE_NEIGHBOUR"),
    ],
    ids=["a write", "a write through a view", "a grad-mode block"],
)
def test_no_match_crosses(program: Callable[..., Any], reason: str) -> None:
    rewrite = ruled(program, CHAIN)
    assert why_not(rewrite) == [reason]
    assert is_same(program, rewrite)


def test_a_result_that_is_written_later_may_be_computed_otherwise() -> None:
    with torch.no_grad():
        rewrite = ruled(_written_result, CHAIN)
    assert found(rewrite) == 1
    assert is_same(_written_result, rewrite, grad=False)


def _saved_input_written(x: Tensor, y: Tensor) -> Tensor:
    value = x * 2
    risen = torch.exp(value)
    value.mul_(3)
    return risen + value + y


def _saved_result_written(x: Tensor, y: Tensor) -> Tensor:
    risen = torch.sin(x)
    risen.mul_(y)
    return risen


SAVING = Rule(lambda x: torch.exp(x), lambda x: torch.sinh(x) + torch.cosh(x), name="saves its input")
SAVING_RESULT = Rule(lambda x: torch.sin(x), lambda x: torch.tanh(torch.atanh(torch.sin(x))), name="saves its result")


@pytest.mark.parametrize(
    "program,rule",
    [(_saved_input_written, SAVING), (_saved_result_written, SAVING_RESULT)],
    ids=["an input", "a result"],
)
def test_what_backward_may_need_is_not_written_afterwards(program: Callable[..., Any], rule: Rule) -> None:
    rewrite = ruled(program, rule)
    assert why_not(rewrite) == ["MAY_BE_SAVED"]
    with torch.no_grad():
        assert found(ruled(program, rule)) == 1


def test_what_backward_needs_nothing_of_may_be_written_afterwards() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        value = x * 2
        total = value + y
        value.mul_(3)
        return total.mul_(value)

    rewrite = ruled(program, Rule(lambda x, y: x + y, lambda x, y: torch.sub(y, -x), name="sum"))
    assert found(rewrite) == 1
    assert is_same(program, rewrite)


@fxlib.remote(writes="rows")
def push(x: Tensor) -> Tensor:
    return x


@fxlib.remote(reads="rows")
def pull(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("function,reasons", [(push, ["ORDERED_BEFORE_WRITE"]), (pull, [])])
def test_no_match_crosses_a_remote_write(function: Callable[..., Any], reasons: list[str]) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        risen = torch.exp(x)
        told: Tensor = rpc.rpc_sync("ps0", function, (y,))
        return torch.sin(risen) + told

    assert why_not(ruled(program, CHAIN)) == reasons


TWO = Rule(
    lambda x, y: (x.index_select(0, y), x.cos()),
    lambda x, y: (torch.index_select(x, 0, y), torch.cos(x)),
    name="two results",
)


def _commits_between(x: Tensor, y: Tensor, commit: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    one = x * 1
    picked = one.index_select(0, y)
    more = picked + 1
    commit()
    return more, one.cos() * 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: _commits_between(x, y, lambda: x.add_(1)),
        lambda x, y: _commits_between(x, y, lambda: rpc.rpc_sync("ps0", push, (x,))),
    ],
    ids=["an input", "a server"],
)
def test_no_match_of_several_results_encloses_a_write_that_stays_where_the_forward_fails(
    program: Callable[..., Any],
) -> None:
    with torch.no_grad():
        assert why_not(ruled(program, TWO)) == ["ORDERED_BEFORE_WRITE"]
        assert found(ruled(lambda x, y: _commits_between(x, y, lambda: torch.sum(x)), TWO)) == 1


def test_what_a_rule_put_in_fails_before_what_ran_after_the_beginning_of_its_match() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        picked = x.index_select(0, y)
        flat = x.reshape(3)
        return picked * 2 + flat

    rule = Rule(lambda x, y: x.index_select(0, y) * 2, lambda x, y: (x * 2).index_select(0, y))
    rewrite = ruled(program, rule)
    assert found(rewrite) == 1
    with pytest.raises(IndexError):
        program(X, torch.tensor([7]))
    with pytest.raises(IndexError):
        rewrite.module(X, torch.tensor([7]))
    with pytest.raises(RuntimeError, match="shape"):
        rewrite.module(X, torch.tensor([1]))


def test_work_that_draws_or_does_anything_is_never_replaced() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.risen, self.dropped = nn.ReLU(), nn.Dropout()
            self.risen.register_full_backward_hook(lambda *_: None)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.risen(x)) + torch.sigmoid(self.dropped(x))

    rule = Rule(lambda x: torch.sigmoid(torch.relu(x)), lambda x: torch.relu(x))
    assert found(ruled(fxlib.capture(Hooked()), rule)) == 0


SHARES: dict[str, tuple[Callable[..., Any], Rule, int]] = {
    "a result that is written": (lambda x, y: (x * 1).add_(y), SAME, 0),
    "an input that is written later": (lambda x, y: ((x + y), (x * 1), x.add_(1))[1], SAME, 0),
    "a result that is returned beside an input": (lambda x, y: x * 1, SAME, 0),
    "one value that is returned twice": (lambda x, y: (z := x + y, z * 1), SAME, 0),
    "two copies that are returned": (lambda x, y: (z := x.exp(), (z * 1), (z * 1))[1:], SAME, 1),
    "a value of the program's own": (lambda x, y: (x + y) * 1, SAME, 1),
    "a value that stays within": (lambda x, y: (x * 1) + y, SAME, 1),
    "a view that is returned": (lambda x, y: x.view(-1), FLAT, 0),
    "a view that is written": (lambda x, y: (z := x + y, z.view(-1).mul_(2))[0], FLAT, 0),
    "a view that stays within": (lambda x, y: (x + y).view(-1) * 2, FLAT, 1),
}


@pytest.mark.parametrize("case", SHARES)
def test_nobody_can_tell_whether_a_result_shares_memory(case: str) -> None:
    program, rule, times = SHARES[case]
    with torch.no_grad():
        rewrite = ruled(program, rule)
        assert found(rewrite) == times
        assert is_same(program, rewrite, grad=False)
        values = rewrite.module(mine := X.clone(), X.clone())
        places = {each.untyped_storage().data_ptr() for each in (values if isinstance(values, tuple) else (values,))}
        own = program(its := X.clone(), X.clone())
        assert len(places) == len(own if isinstance(own, tuple) else (own,))
        shared = (own if isinstance(own, tuple) else (own,))[
            0
        ].untyped_storage().data_ptr() == its.untyped_storage().data_ptr()
        assert shared == (mine.untyped_storage().data_ptr() in places)


def test_a_bitwise_rule_keeps_the_order_in_which_gradients_are_added_up() -> None:
    rule = Rule(lambda x, y: torch.sin(x) + y, lambda x, y: torch.add(y, torch.sin(x)))

    def program(x: Tensor, y: Tensor) -> Tensor:
        first = torch.sin(x)
        second = torch.cos(x)
        return (first + y) * second

    assert why_not(ruled(program, rule, bitwise=True)) == ["GRADIENT_ORDER"]
    assert found(ruled(program, rule)) == 1


def test_too_many_ways_to_read_a_program_are_not_all_tried() -> None:
    def balanced(leaves: list[Any]) -> Any:
        while len(leaves) > 1:
            leaves = [one + other for one, other in zip(leaves[::2], leaves[1::2], strict=True)]
        return leaves[0]

    def pattern(x: Any) -> Any:
        return balanced([torch.sin(x)] + [torch.exp(x) for _ in range(31)])

    rule = Rule(pattern, lambda x: torch.exp(x) * 31 + torch.sin(x))
    rewrite = ruled(lambda x, y: balanced([torch.cos(x)] + [torch.exp(x) for _ in range(31)]) + y, rule)
    assert why_not(rewrite) == ["MATCH_AMBIGUOUS"]
