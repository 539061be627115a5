"""Which calls travel in one message, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.passes import CoalesceCalls, Context, SplitCalls
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops.registry import waits_of
from fxlib.spec.contract import Contract
from fxlib.spec.profile import Profile
from fxlib.spec.workload import Workload
from tests.analysis.sketch import WRITE, Sketch
from tests.passes.reads import COUNT, MANY, READ, batches, call, coalesced, server, three_reads


def test_reads_of_one_server_travel_together() -> None:
    rewrite, found = coalesced(three_reads())
    assert found == [["a", "b", "c"]]
    assert rewrite.passes[-1].changes == 3


def test_each_server_has_a_message_of_its_own() -> None:
    program = Sketch("ids")
    reads = [program.call(f"read_{i}", program.inputs[0], to=f"ps{i % 2}", contract=READ) for i in range(4)]
    assert coalesced(program.returns(*reads))[1] == [["read_0", "read_2"], ["read_1", "read_3"]]


def test_a_server_that_the_run_names_may_have_one_too() -> None:
    program = Sketch("ids", "to")
    reads = [program.call(name, program.inputs[0], to=program.inputs[1], contract=READ) for name in "ab"]
    assert coalesced(program.returns(*reads))[1] == [["a", "b"]]


def test_calls_keep_their_names_contracts_and_places_in_the_program() -> None:
    module = three_reads(MANY)
    orders = {node.name: place for place, node in enumerate(module.graph.nodes)}
    rewrite, _ = coalesced(module)
    (batch,) = batches(rewrite.module)
    waits = waits_of(batch)
    assert waits is not None
    for wait in waits:
        assert (wait.meta["call"], wait.meta["contract"], wait.meta["order"]) == (wait.name, MANY, orders[wait.name])
    assert batch.meta["contract"].reads == MANY.reads
    assert batch.meta["order"] == orders["c"]


def first_for_second() -> CapturedModule:
    """A call that needs the answer of another, and one that needs none."""
    program = Sketch("ids")
    first = program.call("first", program.inputs[0], contract=READ)
    second = program.call("second", program.work("index", torch.argmax, first), contract=READ)
    third = program.call("third", program.inputs[0], contract=READ)
    return program.returns(second, third)


def test_a_read_that_needs_the_result_of_another_goes_later() -> None:
    known = Profile(calls=tuple(call(name) for name in ("first", "second", "third")), servers=(server(None),))
    assert coalesced(first_for_second(), known)[1] == [["first", "third"]]


def test_an_answer_that_another_call_needs_travels_with_no_other_that_nobody_has_timed() -> None:
    rewrite, found = coalesced(first_for_second())
    assert found == []
    assert {each.reason for each in rewrite.passes[-1].declined} == {Reason.BATCH_UNMEASURED}


@pytest.mark.parametrize("target, together", [(torch.relu, True), (torch.matmul, False)])
def test_answers_that_much_work_waits_for_travel_apart_unless_they_were_timed(target: Any, together: bool) -> None:
    program = Sketch("ids", "x")
    found = [program.call(name, program.inputs[0], contract=READ) for name in "ab"]
    rest = [] if target is torch.relu else [program.inputs[1]]
    worked = [program.work(f"for_{each.name}", target, each, *rest) for each in found]
    module = program.returns(program.work("both", torch.add, *worked))
    assert coalesced(module)[1] == ([["a", "b"]] if together else [])


def test_a_write_of_what_is_read_stands_between() -> None:
    program = Sketch("ids")
    before = [program.call(name, program.inputs[0], contract=READ) for name in "ab"]
    counts = [program.call("count", program.inputs[0], contract=COUNT)]
    program.call("push", program.inputs[0], contract=WRITE)
    after = [program.call(name, program.inputs[0], contract=READ) for name in "cd"]
    counts.append(program.call("recount", program.inputs[0], contract=COUNT))
    found = coalesced(program.returns(*before, *after, *counts))[1]
    assert ["c", "d"] in found
    assert {"a", "b", "count", "recount"} == {name for batch in found for name in batch} - {"c", "d"}


@pytest.mark.parametrize(
    "contract",
    [None, WRITE, Contract(reads=frozenset({"table"}))],
    ids=["without a contract", "a write", "not batchable"],
)
def test_other_calls_travel_alone(contract: Contract | None) -> None:
    program = Sketch("ids")
    calls = [program.call(name, program.inputs[0], contract=contract) for name in "ab"]
    assert coalesced(program.returns(*calls))[1] == []


def test_calls_with_other_timeouts_travel_apart() -> None:
    module = three_reads()
    reads = [node for node in module.graph.nodes if node.name in "abc"]
    reads[0].args = (*reads[0].args[:4], 5.0)
    assert coalesced(module)[1] == [["b", "c"]]


def test_a_message_carries_no_more_than_its_limits() -> None:
    program = Sketch("ids")
    module = program.returns(*(program.call(f"r{i}", program.inputs[0], contract=READ) for i in range(6)))
    assert coalesced(module, max_calls=4)[1] == [["r0", "r1", "r2", "r3"], ["r4", "r5"]]
    sizes = (400, 400, 400, 5000, 400, 400)
    profile = Profile(calls=tuple(call(f"r{i}", size=size) for i, size in enumerate(sizes)), servers=(server(0.0),))
    assert coalesced(module, profile, batch_bytes=1000)[1] == [["r0", "r1"], ["r4", "r5"]]


def test_optimize_heeds_how_the_steps_of_a_workload_run() -> None:
    workload = Workload(batches=[(torch.zeros(2),)], mode="distributed")
    assert batches(recipes.optimize(three_reads()))
    assert not batches(recipes.optimize(three_reads(), workload=workload))


def test_an_order_of_uses_that_messages_would_break_keeps_them_apart() -> None:
    """Both servers' calls use one tensor that takes a gradient, in turns: two messages would swap some uses."""
    program = Sketch("x")
    calls = [program.call(f"c{i}", program.inputs[0], to=f"ps{i % 2}", contract=READ) for i in range(4)]
    rewrite, found = coalesced(program.returns(*calls))
    assert found == []
    assert not rewrite.passes[-1].changes


def test_the_next_pass_knows_what_must_stay_before_what_without_looking_again() -> None:
    program = Sketch("ids", "x")
    before = [program.call(name, program.inputs[0], contract=READ) for name in "ab"]
    work = program.work("work", torch.relu, program.inputs[1])
    program.call("push", program.work("sum", torch.add, before[0], work), contract=WRITE)
    after = [program.call(name, program.inputs[0], contract=READ) for name in "cd"]
    module = program.returns(work, *before, *after)
    context = Context(module)
    SplitCalls()(module, context)
    assert CoalesceCalls()(module, context).result.changes == 4
    kept = context.get(Dependencies)
    assert kept is not Dependencies.of(module)
    assert all_before(kept) == all_before(Dependencies.of(module))


def all_before(dependencies: Dependencies) -> dict[str, set[str]]:
    """For each node, by name, the names of all that must come before it."""
    nodes, found = dependencies.effects.nodes, dict[str, set[str]]()
    for place, node in enumerate(nodes):
        sources = [nodes[source].name for source in dependencies.sources(place)]
        found[node.name] = set(sources).union(*(found[source] for source in sources))
    return found


def test_calls_on_both_sides_of_a_fence_travel_apart() -> None:
    program = Sketch("ids")
    before = [program.call(name, program.inputs[0], contract=READ) for name in "ab"]
    program.work("fence", print, "here")
    after = [program.call(name, program.inputs[0], contract=READ) for name in "cd"]
    assert coalesced(program.returns(*before, *after))[1] == [["a", "b"], ["c", "d"]]


def test_the_schedule_reports_calls_of_a_batch_one_by_one() -> None:
    rewrite = recipes.apply(three_reads())
    assert [(each.node, each.function, each.to, each.action, each.reason) for each in rewrite.calls] == [
        (name, "shop:lookup", "ps0", "merged", Reason.COALESCED) for name in "abc"
    ]


@pytest.mark.parametrize("names, others", [("ab", "1 other"), ("abc", "2 others")])
def test_the_schedule_counts_the_other_calls_of_a_batch(names: str, others: str) -> None:
    program = Sketch("ids")
    module = program.returns(*[program.call(name, program.inputs[0], contract=READ) for name in names])
    assert {each.detail for each in recipes.apply(module).calls} == {others}
