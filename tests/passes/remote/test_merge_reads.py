"""Which reads are made once for several."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from fxlib.passes import MergeReads, SplitCalls
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Recipe, Rewrite
from fxlib.spec.contract import Contract
from fxlib.spec.profile import CallProfile, Opaque, Profile, Spread, TensorShape
from tests.analysis.sketch import READ, WRITE, Sketch, names


def merged(module: GraphModule, profile: Profile | None = None) -> Rewrite:
    return recipes.apply(module, Recipe(name="test", passes=(MergeReads(),)), profile=profile)


def reads(rewrite: Rewrite) -> list[str]:
    return [name for name in names(rewrite.module) if name.startswith("read")]


def hindrances(rewrite: Rewrite) -> list[Reason]:
    return [each.reason for each in rewrite.passes[-1].declined]


class Twice:
    """A program that makes one read twice, and uses both results as indices."""

    def __init__(self) -> None:
        self.program = Sketch("ids", "x")
        self.ids, self.x = self.program.inputs

    def read(self, name: str, *, contract: Contract | None = READ, to: str = "ps0") -> torch.fx.Node:
        node = self.program.call(name, self.ids, contract=contract, to=to)
        node.args = (to, "shop:read", *node.args[2:])
        return node

    def used(self, *results: torch.fx.Node) -> GraphModule:
        largest = [self.program.work(f"largest_{place}", torch.argmax, each) for place, each in enumerate(results)]
        return self.program.returns(*largest)


def test_a_read_that_is_made_twice_is_made_once() -> None:
    twice = Twice()
    rewrite = merged(twice.used(twice.read("read_1"), twice.read("read_2"), twice.read("read_3")))
    assert reads(rewrite) == ["read_1"]
    assert [(each.node, each.action, each.reason, each.detail) for each in rewrite.calls if each.node != "read_1"] == [
        (name, "merged", Reason.MERGED, "read_1") for name in ("read_2", "read_3")
    ]


def test_reads_that_were_split_are_merged_with_both_their_halves() -> None:
    twice = Twice()
    module = twice.used(twice.read("read_1"), twice.read("read_2"))
    rewrite = recipes.apply(module, Recipe(name="test", passes=(SplitCalls(), MergeReads())))
    assert reads(rewrite) == ["read_1_issue", "read_1"]
    assert [(each.node, each.action) for each in rewrite.calls if each.action == "merged"] == [("read_2", "merged")]
    assert hindrances(rewrite) == []


def test_of_reads_that_were_split_those_with_a_write_between_them_stay() -> None:
    twice = Twice()
    first = twice.read("read_1")
    twice.program.call("push", twice.x, contract=WRITE)
    module = twice.used(first, twice.read("read_2"))
    rewrite = recipes.apply(module, Recipe(name="test", passes=(SplitCalls(), MergeReads())))
    assert reads(rewrite) == ["read_1_issue", "read_1", "read_2_issue", "read_2"]


def test_the_whole_recipe_keeps_a_read_for_two() -> None:
    twice = Twice()
    rewrite = recipes.apply(twice.used(twice.read("read_1"), twice.read("read_2")))
    assert reads(rewrite) == ["read_1"]


def test_reads_of_other_servers_and_arguments_stay() -> None:
    twice = Twice()
    other = twice.read("read_3")
    other.args = (*other.args[:2], (twice.ids, 1), *other.args[3:])
    another = twice.read("read_4")
    another.args = (*another.args[:2], (twice.ids, 1.0), *another.args[3:])
    rewrite = merged(twice.used(twice.read("read_1"), twice.read("read_2", to="ps1"), other, another))
    assert len(reads(rewrite)) == 4


def test_a_read_after_a_write_of_what_it_reads_stays() -> None:
    twice = Twice()
    first = twice.read("read_1")
    twice.program.call("push", twice.x, contract=WRITE)
    assert reads(merged(twice.used(first, twice.read("read_2")))) == ["read_1", "read_2"]


def test_a_read_after_a_write_of_something_else_does_not() -> None:
    twice = Twice()
    first = twice.read("read_1")
    twice.program.call("push", twice.x, contract=Contract(writes=frozenset({"log"})))
    assert reads(merged(twice.used(first, twice.read("read_2")))) == ["read_1"]


def test_a_read_whose_argument_was_written_since_stays() -> None:
    twice = Twice()
    first = twice.read("read_1")
    twice.program.work("written", "add_", twice.ids, 1)
    assert reads(merged(twice.used(first, twice.read("read_2")))) == ["read_1", "read_2"]


def test_calls_that_write_or_declare_nothing_stay() -> None:
    for contract in (WRITE, None):
        twice = Twice()
        module = twice.used(twice.read("read_1", contract=contract), twice.read("read_2", contract=contract))
        assert reads(merged(module)) == ["read_1", "read_2"]


def test_a_result_that_is_changed_is_not_shared() -> None:
    twice = Twice()
    first, second = twice.read("read_1"), twice.read("read_2")
    view = twice.program.work("view", "view", first, -1)
    twice.program.work("changed", "add_", view, 1)
    rewrite = merged(twice.used(first, second))
    assert reads(rewrite) == ["read_1", "read_2"]
    assert hindrances(rewrite) == [Reason.RESULT_CHANGED]


def test_a_result_whose_view_goes_to_code_that_may_change_it_is_not_shared() -> None:
    for unknown in (True, False):
        twice = Twice()
        first, second = twice.read("read_1"), twice.read("read_2")
        first.meta["requires_grad"] = second.meta["requires_grad"] = False
        view = twice.program.work("view", "view", first, -1)
        if unknown:
            twice.program.call("anything", view, contract=None)
        else:
            twice.program.work("anything", opaque, view)
        rewrite = merged(twice.used(first, second))
        assert reads(rewrite) == ["read_1", "read_2"]
        assert hindrances(rewrite) == [Reason.RESULT_CHANGED]


def opaque(rows: torch.Tensor) -> None:
    rows.zero_()


def test_a_result_that_leaves_the_module_is_not_shared() -> None:
    twice = Twice()
    first, second = twice.read("read_1"), twice.read("read_2")
    rewrite = merged(twice.program.returns(first, twice.program.work("largest", torch.argmax, second)))
    assert reads(rewrite) == ["read_1", "read_2"]
    assert hindrances(rewrite) == [Reason.RESULT_ESCAPES]


def test_two_results_that_one_call_sends_stay_two_tensors() -> None:
    twice = Twice()
    first, second = twice.read("read_1"), twice.read("read_2")
    first.meta["requires_grad"] = second.meta["requires_grad"] = False
    twice.program.call("sends_both", {"first": first, "others": [twice.program.work("view", "view", second, -1)]})
    rewrite = merged(twice.used(first, second))
    assert reads(rewrite)[:2] == ["read_1", "read_2"]
    assert hindrances(rewrite) == [Reason.SENT_TOGETHER]


def test_a_result_that_may_take_a_gradient_is_shared_only_if_it_was_seen_without_one() -> None:
    def program() -> GraphModule:
        twice = Twice()
        both = twice.program.work("both", torch.add, twice.read("read_1"), twice.read("read_2"))
        return twice.program.returns(twice.program.work("sum", torch.sum, both))

    rewrite = merged(program())
    assert reads(rewrite) == ["read_1", "read_2"]
    assert hindrances(rewrite) == [Reason.RESULT_TAKES_GRADIENT]
    assert reads(merged(program(), profile(requires_grad=True))) == ["read_1", "read_2"]
    assert reads(merged(program(), profile(requires_grad=False))) == ["read_1"]


def test_where_no_gradients_are_recorded_none_is_taken() -> None:
    twice = Twice()
    twice.program.work("off", torch._C._set_grad_enabled, False)
    both = twice.program.work("both", torch.add, twice.read("read_1"), twice.read("read_2"))
    total = twice.program.work("sum", torch.sum, both)
    twice.program.work("on", torch._C._set_grad_enabled, True)
    assert reads(merged(twice.program.returns(total))) == ["read_1"]


def profile(*, requires_grad: bool) -> Profile:
    rows = TensorShape(shape=(2,), dtype=torch.float32, requires_grad=requires_grad)
    calls = (
        CallProfile(
            call=name,
            function="shop:read",
            to="ps0",
            request_bytes=8,
            response_bytes=8,
            returns={"rows": rows, "count": Opaque(value=1)},
            issue_s=1e-4,
            wait_s=1e-5,
            service_s=Spread.of([1e-3]),
        )
        for name in ("read_1", "read_2")
    )
    return Profile(calls=tuple(calls))


enumerated: Any = IntEnum
# Two enumerations of one name, as two parts of a program may have them.
USERS, ITEMS = (enumerated("Kind", ["FIRST"])(1) for _ in range(2))


@pytest.mark.parametrize("one, other", [(USERS, ITEMS), ([USERS], [ITEMS]), (1, True), (0.0, -0.0)])
def test_arguments_that_are_equal_and_of_other_types_are_not_the_same(one: Any, other: Any) -> None:
    twice = Twice()
    calls = [twice.read("read_1"), twice.read("read_2"), twice.read("read_3")]
    for call, kind in zip(calls, (one, other, one), strict=True):
        call.args = (*call.args[:2], (twice.ids, kind), *call.args[3:])
    assert reads(merged(twice.used(*calls))) == ["read_1", "read_2"]
