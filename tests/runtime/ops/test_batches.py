"""Calls that are issued as one and waited for one by one: each returns and raises as if it had gone alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from fxlib import batch
from fxlib.errors import ContractError, FxlibWarning
from fxlib.runtime import record
from fxlib.runtime.ops import batches, issue_batch, remote_call, wait_item
from fxlib.runtime.ops.batches import NamedCall
from fxlib.runtime.ops.registry import waits_of
from fxlib.runtime.tracking.flow_control import DEADLINES
from tests.batch import functions
from tests.runtime.graphs import Program

pytestmark = pytest.mark.usefixtures("servers")
NAME = functions.NAME
X = torch.tensor([1.0, 2.0])


def call(name: str, *args: object) -> NamedCall:
    return f"{NAME}:{name}", args, {}


@pytest.fixture
def only_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that no server has, and servers that have refused nothing yet."""

    def only_here() -> None: ...

    only_here.__module__, only_here.__qualname__ = NAME, "only_here"
    monkeypatch.setattr(functions, "only_here", only_here, raising=False)
    monkeypatch.setattr(batches, "_REFUSED_BY", set())
    return only_here


def log() -> list[str]:
    return [entry for name in ("ps0", "ps1") for entry in rpc.rpc_sync(name, functions.take_log)]


@pytest.mark.parametrize("batched_by", [None, f"{NAME}:double_many"])
def test_each_call_has_its_own_result(batched_by: str | None) -> None:
    batch = issue_batch("ps0", tuple(call("double", X + place) for place in range(5)), None, batched_by)
    for place in (3, 0, 4, 1, 2):
        assert torch.equal(wait_item(batch, place), (X + place) * 2)


def test_each_call_has_its_own_error() -> None:
    batch = issue_batch("ps0", (call("double", X), call("fail", "second"), call("fail", "third")), None, None)
    assert torch.equal(wait_item(batch, 0), X * 2)
    for place, text in ((2, "third"), (1, "second")):
        with pytest.raises(RuntimeError, match=text) as caught:
            wait_item(batch, place)
        with pytest.raises(RuntimeError) as alone:
            remote_call("ps0", *call("fail", text), None)
        # How much of this process's own stack torch adds after that depends on who comes first, the wait or the answer.
        assert str(caught.value).partition("_handle_exception")[0] == str(alone.value).partition("_handle_exception")[0]


def test_what_cannot_be_sent_fails_alone() -> None:
    batch = issue_batch("ps0", (call("double", X), call("slow", lambda: 1), call("double", X)), None, None)
    assert torch.equal(wait_item(batch, 0), X * 2)
    with pytest.raises(Exception, match="pickle"):
        wait_item(batch, 1)


def test_an_unknown_function_or_server_is_told_by_the_wait() -> None:
    batch = issue_batch("ps0", (call("double", X), call("nothing", X)), None, None)
    assert torch.equal(wait_item(batch, 0), X * 2)
    with pytest.raises(ContractError, match="nothing"):
        wait_item(batch, 1)
    nowhere = issue_batch("ps9", (call("double", X),), None, None)
    with pytest.raises(Exception, match="ps9"):
        wait_item(nowhere, 0)


@pytest.mark.slow
def test_calls_that_take_too_long_together_are_made_singly_and_given_more_time_from_then_on() -> None:
    log()
    calls = tuple(call("slow", 0.25) for _ in range(5))
    for _ in range(4):
        batch = issue_batch("ps0", calls, 1.2, f"{NAME}:slow_in_turn")
        assert [wait_item(batch, place) for place in range(5)] == [0.25] * 5
    entries = log()
    assert entries.count("slow_in_turn of 5") == 4
    assert 5 <= entries.count("slow 0.25") - 4 * 5 < 20


@pytest.mark.slow
def test_a_call_that_takes_too_long_leaves_the_others_their_results_and_errors() -> None:
    late = issue_batch("ps0", (call("slow", 0.05), call("slow", 3.0)), 1.0, None)
    with pytest.raises(RuntimeError, match="timeout") as caught:
        wait_item(late, 1)
    with pytest.raises(RuntimeError, match="timeout") as alone:
        remote_call("ps0", *call("slow", 3.0), 1.0)
    assert str(caught.value) == str(alone.value)
    assert wait_item(late, 0) == 0.05
    failing = issue_batch("ps0", (call("fail", "first"), call("slow", 3.0)), 1.0, None)
    with pytest.raises(RuntimeError, match="first"):
        wait_item(failing, 0)


def test_calls_of_one_batch_share_no_memory() -> None:
    flying = issue_batch("ps0", (call("raised_by", X),) * 3, None, None)
    assert [wait_item(flying, place).tolist() for place in range(3)] == [[2.0, 3.0]] * 3
    wait_item(flying, 0).zero_()
    assert wait_item(flying, 1).tolist() == [2.0, 3.0]


def test_a_server_that_refuses_batches_is_warned_of_once(only_here: Callable[..., Any]) -> None:
    warned = []
    for _ in range(4):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(batch, "run", only_here)
            flying = issue_batch("ps0", (call("double", X), call("double", X)), None, None)
            patch.undo()
            assert wait_item(flying, 1).tolist() == [2.0, 4.0]
        warned.append([str(each.message) for each in caught if each.category is FxlibWarning])
    assert [len(each) for each in warned] == [1, 0, 0, 0]
    assert "ps0" in warned[0][0]
    assert "only_here" in warned[0][0]


def test_a_program_that_fails_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_REFUSED_BY", refused_by := set[str]())
    for name, text in (("fail", "own error"), ("nothing", "nothing")):
        flying = issue_batch("ps0", (call("double", X), call(name, "own error")), None, None)
        with pytest.raises(Exception, match=text):
            wait_item(flying, 1)
    assert not refused_by


@pytest.mark.slow
def test_a_batch_is_in_flight_until_it_is_answered() -> None:
    batch = issue_batch("ps0", (call("slow", 1.0), call("slow", 1.0)), 30.0, None)
    assert DEADLINES.deadline("ps0", 1.0) == 61.0
    wait_item(batch, 0)
    assert DEADLINES.deadline("ps0", 1.0) == 1.0


@pytest.mark.slow
def test_a_batch_that_failed_is_held_no_longer() -> None:
    flying = issue_batch("ps0", (call("slow", 1.0), call("slow", 0.0)), 0.2, batches.IN_ORDER)
    with pytest.raises(RuntimeError, match="200 ms"):
        wait_item(flying, 0)
    assert all(each is not flying.future for calls in DEADLINES._in_flight.values() for each, _ in calls.values())


def test_calls_to_this_process_are_over_when_they_are_issued() -> None:
    functions.take_log()
    issue_batch("trainer", (call("slow", 0.01), call("slow", 0.02)), None, None)
    assert sorted(functions.take_log()) == ["slow 0.01", "slow 0.02"]


def test_only_a_call_of_a_batch_can_be_waited_for() -> None:
    batch = issue_batch("ps0", (call("double", X),), None, None)
    with pytest.raises(ContractError, match="no call 1"):
        wait_item(batch, 1)
    with pytest.raises(ContractError, match="Tensor"):
        wait_item(X, 0)


def test_a_recording_shows_each_call_of_a_batch() -> None:
    program = Program("x")
    batch, (first, second) = program.batch("ps0", call("double", program.inputs[0]), call("slow", 0.1))
    module = program.returns((first, second))
    with record() as recording:
        module(X)
    spans = {(span.kind, span.name): span for span in recording.timeline.spans}
    assert {("issue", batch.name), ("in_flight", "call_0"), ("in_flight", "call_1")} <= spans.keys()
    assert {("wait", "call_0"), ("wait", "call_1")} <= spans.keys()
    assert {span.to for span in spans.values() if span.kind == "in_flight"} == {"ps0"}
    assert waits_of(batch) == (first, second)


def test_a_call_whose_batch_is_not_issued_yet_is_made_where_the_program_makes_it() -> None:
    """The program calls, fails, and would call again: only the first call is made, and its error would be raised."""
    log()
    program = Program("x")
    broken = program.local(torch.Tensor.view, program.inputs[0], 7, order=5)
    _, (first, second) = program.batch("ps0", call("slow", 0.0), call("double", broken), orders=(3, 7))
    with pytest.raises(RuntimeError, match="shape"):
        program.returns((first, second))(X)
    assert log() == ["slow 0.0"]
    failing = Program("x")
    broken = failing.local(torch.Tensor.view, failing.inputs[0], 7, order=5)
    _, waits = failing.batch("ps0", call("fail", "early"), call("double", broken), orders=(3, 7))
    with pytest.raises(RuntimeError, match="early"):
        failing.returns(waits)(X)


def test_of_two_failing_calls_of_a_batch_the_earlier_one_is_raised() -> None:
    program = Program("x")
    _, (first, second) = program.batch("ps0", call("fail", "late"), call("fail", "early"), orders=(4, 2))
    with pytest.raises(RuntimeError, match="early"):
        program.returns((first, second))(X)
