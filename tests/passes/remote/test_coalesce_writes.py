"""Which writes travel in one message, and what it does where one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import rpc
from torch.fx import GraphModule, Node

from fxlib.passes import CoalesceWrites, SplitCalls
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Recipe
from fxlib.runtime.ops.batches import IN_ORDER, issue_batch, wait_item
from fxlib.runtime.ops.registry import is_batch, waits_of
from fxlib.spec.contract import Contract
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, Profile, ServerProfile, Spread
from tests.analysis.sketch import READ as ALONE
from tests.analysis.sketch import Sketch

WRITE = Contract(writes=frozenset({"table"}), batchable=True)
READ = Contract(reads=frozenset({"table"}), batchable=True)


def together(module: GraphModule, profile: Profile | None = None, **options: Any) -> list[list[str]]:
    """Apply the pass; return the names of the calls of each message."""
    recipe = Recipe(name="test", passes=(SplitCalls(), CoalesceWrites(**options)))
    found = [node for node in recipes.apply(module, recipe, profile=profile).module.graph.nodes if is_batch(node)]
    assert all(node.args[3] == IN_ORDER for node in found)
    return [[wait.name for wait in waits_of(node) or ()] for node in found]


def write(program: Sketch, name: str, value: Node | None = None, **options: Any) -> Node:
    return program.call(name, program.inputs[0] if value is None else value, **{"contract": WRITE, **options})


def test_consecutive_writes_to_one_server_travel_together() -> None:
    program = Sketch("x")
    assert together(program.returns(*(write(program, name) for name in "abc"))) == [["a", "b", "c"]]


def test_a_read_of_what_is_written_between_two_writes_travels_with_them() -> None:
    program = Sketch("x")
    calls = [write(program, "a"), write(program, "read", contract=READ), write(program, "b")]
    assert together(program.returns(*calls, write(program, "late", contract=READ))) == [["a", "read", "b"]]


def test_reads_after_the_last_write_stay_apart_side_by_side() -> None:
    program = Sketch("x")
    assert together(program.returns(write(program, "a"), write(program, "b", contract=READ))) == []


@pytest.mark.parametrize(
    "between",
    [
        lambda program, first: write(program, "other", to="ps1"),
        lambda program, first: program.work("use", torch.relu, first),
        lambda program, first: program.work("print", print, program.inputs[0]),
        lambda program, first: program.work("fill", "fill_", program.inputs[0], 0.0),
        lambda program, first: write(program, "read", contract=ALONE),
    ],
    ids=["a write elsewhere", "work on the result", "an opaque call", "a write to an input", "a read that is alone"],
)
def test_what_must_come_after_the_first_write_and_before_the_second_keeps_them_apart(
    between: Callable[[Sketch, Node], Node],
) -> None:
    program = Sketch("x")
    first = write(program, "a")
    used = between(program, first)
    assert together(program.returns(first, used, write(program, "b"))) == []


@pytest.mark.parametrize("contract", [None, Contract(writes=frozenset({"table"}))], ids=["unknown", "not batchable"])
def test_other_calls_travel_alone(contract: Contract | None) -> None:
    program = Sketch("x")
    assert together(program.returns(write(program, "a"), write(program, "b", contract=contract))) == []


def test_calls_with_other_timeouts_travel_alone() -> None:
    program = Sketch("x")
    calls = [write(program, name) for name in "abc"]
    calls[0].args = (*calls[0].args[:4], 5.0)
    assert together(program.returns(*calls)) == [["b", "c"]]


def test_a_message_carries_no_more_than_its_limit() -> None:
    program = Sketch("x")
    assert together(program.returns(*(write(program, name) for name in "abcd")), max_calls=2) == [
        ["a", "b"],
        ["c", "d"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("work_s, expected", [(1e-5, [["a", "b"]]), (0.01, [])])
def test_a_write_that_work_could_hide_does_not_wait_for_the_next(work_s: float, expected: list[list[str]]) -> None:
    program = Sketch("x", "y")
    first = write(program, "a")
    module = program.returns(first, program.work("work", torch.relu, program.inputs[1]), write(program, "b"))
    calls = tuple(
        CallProfile(
            call=name, function=f"shop:{name}", to="ps0", request_bytes=100, response_bytes=0, returns=Opaque(),
            issue_s=1e-4, wait_s=1e-5, service_s=Spread.of([2e-3]),
        )
        for name in "ab"
    )  # fmt: skip
    server = ServerProfile(name="ps0", round_trip_s=1e-3, concurrency=4, bytes_per_s=1e9)
    nodes = (NodeProfile(node="work", seconds=work_s, output_bytes=8),)
    assert together(module, Profile(calls=calls, nodes=nodes, servers=(server,))) == expected


class Failing:
    """A message that was sent, and is never answered."""

    def wait(self) -> object:
        raise RuntimeError("the server is gone")

    def done(self) -> bool:
        return True


def test_a_message_of_writes_that_failed_as_a_whole_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    def record(to: object, function: object, **_: object) -> Failing:
        sent.append(function)
        return Failing()

    monkeypatch.setattr(rpc, "rpc_async", record)
    monkeypatch.setattr(rpc, "get_rpc_timeout", lambda: 60.0)
    flying = issue_batch("ps0", (("torch:neg", (1,), {}), ("torch:abs", (1,), {})), 5.0, IN_ORDER)
    for index in range(2):
        with pytest.raises(RuntimeError, match="the server is gone"):
            wait_item(flying, index)
    assert len(sent) == 1


def test_writes_that_keep_their_own_message_are_as_the_program_has_them() -> None:
    program = Sketch("x")
    module = program.returns(write(program, "a"), write(program, "b", contract=replace(WRITE, batchable=False)))
    recipe = Recipe(name="test", passes=(CoalesceWrites(),))
    assert recipes.apply(module, recipe).module is module
