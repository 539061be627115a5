"""What a collective may cross: a rank joins in it if, and only if, the program as captured would have."""

from __future__ import annotations

import torch

from fxlib.analysis import Dependencies, Effects
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from tests.analysis.sketch import READ, WRITE, Sketch, reason, schedule


def before(module: CapturedModule, one: str, other: str) -> bool:
    """Whether the first node must come before the second one, by whatever chain."""
    dependencies = Dependencies.of(module)
    places = {node.name: place for place, node in enumerate(dependencies.effects.nodes)}
    reached, left = set[int](), [places[other]]
    while left:
        for source in dependencies.sources(left.pop()):
            if source not in reached:
                reached.add(source)
                left.append(source)
    return places[one] in reached


def test_the_wait_of_a_collective_sinks_below_work_that_does_not_need_it() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    reduced = program.collective("reduced", x)
    dense = program.work("dense", torch.sin, x)
    module = program.returns(program.work("both", torch.add, reduced, dense))
    assert schedule(module) == ["reduced_issue", "dense", "reduced", "both"]


def test_a_collective_is_issued_before_local_work_that_stands_before_it() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    dense = program.work("dense", torch.sin, x)
    reduced = program.collective("reduced", ids)
    module = program.returns(program.work("both", torch.add, reduced, dense))
    assert schedule(module) == ["reduced_issue", "dense", "reduced", "both"]


def test_collectives_keep_their_order_whatever_their_groups_and_are_in_flight_together() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    dense = program.work("dense", torch.sin, x)
    first = program.collective("first", dense, "0")
    second = program.collective("second", x, "1")
    module = program.returns(program.work("both", torch.add, first, second))
    assert before(module, "first", "second")
    split = recipes.apply(module, recipes.from_passes([("split_calls", {})])).module
    assert isinstance(split, CapturedModule)
    assert before(split, "first_issue", "second_issue")
    assert not before(split, "first", "second_issue")


def test_a_collective_comes_after_calls_that_may_fail_before_it() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    found = program.call("found", ids)
    reduced = program.collective("reduced", x)
    later = program.call("later", ids)
    module = program.returns(program.work("sum", torch.add, program.work("both", torch.add, found, reduced), later))
    assert before(module, "found", "reduced")
    assert not before(module, "reduced", "later")
    order = schedule(module)
    assert order.index("later_issue") < order.index("found") < order.index("reduced")


def test_a_collective_comes_after_work_that_raises_for_values() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    row = program.work("row", torch.Tensor.__getitem__, x, ids)
    reduced = program.collective("reduced", x)
    checked = program.work("checked", torch._assert, ids, "no rows")
    other = program.collective("other", x)
    module = program.returns(row, reduced, checked, other)
    assert before(module, "checked", "other")
    assert not before(module, "checked", "reduced")


def test_a_write_on_a_server_comes_after_the_collectives_before_it() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    reduced = program.collective("reduced", x)
    pushed = program.call("pushed", ids, contract=WRITE)
    assert before(program.returns(reduced, pushed), "reduced", "pushed")


def test_unknown_calls_may_take_part_in_collectives_and_declared_ones_do_not() -> None:
    unknown, declared = (
        Effects.of(program.returns(program.call("call", contract=contract), program.collective("c", x)))
        for program, contract in ((Sketch("x"), None), (Sketch("x"), READ))
        for x in program.inputs
    )
    assert unknown.per_node[1].writes & unknown.per_node[2].writes
    assert not declared.per_node[1].writes & declared.per_node[2].writes


def test_what_a_collective_reads_is_written_after_its_wait_and_its_result_is_its_own() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    reduced = program.collective("reduced", x)
    written = program.work("written", "add_", x, 1)
    own = program.work("own", "mul_", reduced, 2)
    module = program.returns(written, own)
    effects = Effects.of(module)
    assert before(module, "reduced", "written")
    assert effects.aliases.of(reduced) != effects.aliases.of(x)


def test_a_collective_says_what_holds_it() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    found = program.call("found", ids)
    reduced = program.collective("reduced", ids)
    module = program.returns(program.work("used", torch.add, found, reduced))
    rewrite = recipes.apply(module)
    assert reason(rewrite, "reduced") is Reason.COLLECTIVE_ORDER
