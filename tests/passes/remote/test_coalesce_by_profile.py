"""Which calls travel together where a profile says what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule

from fxlib.reasons import Reason
from fxlib.spec.contract import PURE, Contract
from fxlib.spec.profile import CallProfile, NodeProfile, Profile
from fxlib.spec.workload import Workload
from tests.analysis.sketch import Sketch
from tests.passes.reads import MANY, READ, batches, call, coalesced, server, three_reads


def test_a_call_whose_arguments_take_much_more_work_travels_alone() -> None:
    program = Sketch("ids", root=nn.Sequential(*(nn.Linear(512, 512) for _ in range(9))))
    early = [program.call(name, program.inputs[0], contract=PURE_BATCHABLE) for name in "ab"]
    deep = program.inputs[0]
    for layer in range(9):
        deep = program.module(f"layer_{layer}", str(layer), deep)
    late = [program.call(name, deep, contract=PURE_BATCHABLE) for name in "cd"]
    assert coalesced(program.returns(*early, *late))[1] == [["a", "b"], ["c", "d"]]


PURE_BATCHABLE = Contract(pure=PURE.pure, batchable=True)


@pytest.mark.parametrize(
    "needs_late, deep_s, expected",
    [
        (False, 0.01, [["a", "b"], ["c", "d"]]),
        (False, 1e-6, [["a", "b", "c", "d"]]),
        (True, 0.01, [["a", "b", "c", "d"]]),
    ],
)
def test_a_call_is_issued_as_late_as_another_where_measured_work_says_that_nobody_misses_its_answer(
    needs_late: bool, deep_s: float, expected: list[list[str]]
) -> None:
    program = Sketch("ids")
    early = [program.call(name, program.inputs[0], contract=READ) for name in "ab"]
    deep = program.work("deep", torch.bincount, program.inputs[0])
    late = [program.call(name, deep, contract=READ) for name in "cd"]
    used = program.work("cat", torch.cat, [*early, *late] if needs_late else early)
    nodes = [NodeProfile(node=name, seconds=each, output_bytes=8) for name, each in (("deep", deep_s), ("cat", 0.005))]
    profile = Profile(calls=tuple(call(name) for name in "abcd"), nodes=tuple(nodes), servers=(server(0.0),))
    assert coalesced(program.returns(used, *late), profile)[1] == expected


def consumed_one_by_one() -> GraphModule:
    """Three reads; the result of each goes through work of its own."""
    program = Sketch("ids")
    reads = [program.call(name, program.inputs[0], contract=READ) for name in "abc"]
    works = [program.work(f"work_{each.name}", torch.relu, each) for each in reads]
    return program.returns(program.work("joined", torch.cat, works))


def consumed(work_s: float, *calls: CallProfile, others: float = 0.0) -> Profile:
    nodes = [NodeProfile(node=f"work_{name}", seconds=work_s, output_bytes=8) for name in "abc"]
    nodes.append(NodeProfile(node="meanwhile", seconds=others, output_bytes=8))
    return Profile(calls=calls, nodes=tuple(nodes), servers=(server(0.0),))


SPREAD_OUT = (call("a"), call("b", service_s=0.02), call("c", service_s=1.1e-3))


def test_a_quick_answer_that_the_trainer_can_use_does_not_wait_for_a_slow_one() -> None:
    assert coalesced(consumed_one_by_one(), consumed(0.005, *SPREAD_OUT))[1] == [["a", "c"]]


def test_a_quick_answer_with_little_to_do_may_wait_for_a_slow_one() -> None:
    assert coalesced(consumed_one_by_one(), consumed(1e-5, *SPREAD_OUT))[1] == [["a", "b", "c"]]


def test_a_quick_answer_may_wait_where_its_consumer_needs_the_slow_one_too() -> None:
    profile = Profile(calls=SPREAD_OUT, servers=(server(0.0),))
    assert coalesced(three_reads(), profile)[1] == [["a", "b", "c"]]


def test_a_quick_answer_may_wait_while_the_trainer_has_other_work() -> None:
    program = Sketch("ids", "x")
    reads = [program.call(name, program.inputs[0], contract=READ) for name in "abc"]
    meanwhile = program.work("meanwhile", torch.relu, program.inputs[1])
    module = program.returns(meanwhile, *(program.work(f"work_{each.name}", torch.relu, each) for each in reads))
    assert coalesced(module, consumed(0.005, *SPREAD_OUT, others=1e-3))[1] == [["a", "c"]]
    assert coalesced(module, consumed(0.005, *SPREAD_OUT, others=0.02))[1] == [["a", "b", "c"]]


def test_a_quick_answer_that_lets_another_call_leave_does_not_wait_for_a_slow_one() -> None:
    program = Sketch("ids")
    first, slow = (program.call(name, program.inputs[0], contract=READ) for name in "ab")
    second = program.call("second", program.work("index", torch.argmax, first), contract=READ)
    profile = Profile(calls=(*SPREAD_OUT[:2], call("second", service_s=0.02)), servers=(server(0.0),))
    assert coalesced(program.returns(slow, second), profile)[1] == []


def test_the_first_issue_of_a_step_takes_longer_and_divides_no_message() -> None:
    calls = [call(name, service_s=2e-4, issue_s=each) for name, each in zip("abc", (6e-4, 2e-4, 2e-4), strict=True)]
    assert coalesced(consumed_one_by_one(), consumed(0.005, *calls))[1] == [["a", "b", "c"]]


@pytest.mark.parametrize(
    "issues_s, expected",
    [
        ((2e-2, 2e-4, 2e-4), [["b", "c"]]),  # more than the caches explain
        ((2e-4, 2e-4, 6e-4), [["a", "b"]]),  # a later one, which takes so long wherever it stands
    ],
)
def test_an_issue_that_takes_longer_for_a_reason_of_its_own_travels_alone(
    issues_s: tuple[float, ...], expected: list[list[str]]
) -> None:
    calls = [call(name, service_s=2e-4, issue_s=each) for name, each in zip("abc", issues_s, strict=True)]
    assert coalesced(consumed_one_by_one(), consumed(0.005, *calls))[1] == expected


@pytest.mark.slow
@settings(max_examples=100)
@given(
    service_s=st.floats(1e-5, 0.02),
    noise=st.lists(st.floats(1.0, 4.0), min_size=26, max_size=26),
    each_has_work=st.booleans(),
)
def test_noise_in_what_calls_of_one_function_took_divides_no_message(
    service_s: float, noise: list[float], each_has_work: bool
) -> None:
    program = Sketch("ids")
    rows = [program.call(f"r{i}", program.inputs[0], to=f"ps{i % 2}", contract=MANY) for i in range(26)]
    for node in rows:
        node.args = (node.args[0], "shop:lookup", *node.args[2:])
    works = [program.work(f"work_{i}", torch.relu, each) for i, each in enumerate(rows)] if each_has_work else rows
    module = program.returns(program.work("cat", torch.cat, works))
    calls = [call(f"r{i}", to=f"ps{i % 2}", service_s=service_s * each) for i, each in enumerate(noise)]
    nodes = [NodeProfile(node=f"work_{i}", seconds=1e-3, output_bytes=8) for i in range(26)]
    servers = [replace(server(0.0), name=name) for name in ("ps0", "ps1")]
    found = coalesced(module, Profile(calls=tuple(calls), nodes=tuple(nodes), servers=tuple(servers)))[1]
    assert found == [[f"r{i}" for i in range(first, 26, 2)] for first in (0, 1)]


def test_where_each_item_keeps_the_server_busy_calls_stay_apart_and_the_report_says_why() -> None:
    profile = Profile(calls=tuple(call(name, service_s=0.01) for name in "abc"), servers=(server(0.0099),))
    rewrite, found = coalesced(three_reads(), profile)
    assert found == []
    assert [each.reason for each in rewrite.passes[-1].declined] == [Reason.BATCH_SLOWER] * 3


def test_a_declared_batched_form_is_used_where_a_profile_says_that_it_keeps_the_server_no_longer() -> None:
    slow = Profile(calls=tuple(call(name, service_s=0.01) for name in "abc"), servers=(server(1e-4),))
    quick = Profile(calls=slow.calls, servers=(server(1e-4, per_turn_s=5e-5),))
    tried = Profile(calls=slow.calls, servers=(server(1e-4, per_turn_s=5e-3),))
    for profile, form in ((None, None), (quick, "shop:many"), (slow, None), (tried, None)):
        rewrite, found = coalesced(three_reads(MANY), profile)
        assert found == [["a", "b", "c"]]
        assert batches(rewrite.module)[0].args[3] == form
    assert batches(coalesced(three_reads(MANY), quick, declared=False)[0].module)[0].args[3] is None


def test_under_distributed_autograd_only_brief_calls_travel_together() -> None:
    """There, the server runs the calls of a batch one after another."""
    workload = Workload(batches=[(torch.zeros(2),)], mode="distributed")
    slow = Profile(calls=tuple(call(name, service_s=0.01) for name in "abc"), servers=(server(0.0),))
    quick = Profile(calls=tuple(call(name, service_s=1.5e-4) for name in "abc"), servers=(server(0.0),))
    for profile, expected in ((None, []), (slow, []), (quick, [["a", "b", "c"]])):
        assert coalesced(three_reads(MANY), profile, workload)[1] == expected


def test_a_batched_form_serves_calls_of_its_own_function_alone() -> None:
    program = Sketch("ids")
    calls = [program.call(name, program.inputs[0], contract=MANY) for name in "ab"]
    for node in calls:
        node.args = (node.args[0], "shop:lookup", *node.args[2:])
    other = program.call("other", program.inputs[0], contract=MANY)
    quick = Profile(calls=tuple(call(name) for name in ("a", "b", "other")), servers=(server(1e-4, per_turn_s=5e-5),))
    assert coalesced(program.returns(*calls, other), quick)[1] == [["a", "b"]]


def test_a_function_with_nothing_but_a_batched_form_is_batched_only_where_a_profile_says_that_it_pays() -> None:
    contract = replace(MANY, batchable=False)
    slow, quick = (
        Profile(calls=tuple(call(name, service_s=service_s) for name in "abc"), servers=(server(0.0),))
        for service_s in (0.01, 1e-4)
    )
    for profile, expected in ((None, []), (slow, []), (quick, [["a", "b", "c"]])):
        assert coalesced(three_reads(contract), profile)[1] == expected
