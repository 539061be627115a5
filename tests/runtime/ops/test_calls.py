"""What may be scheduled is what is registered."""

from __future__ import annotations

import pytest
import torch

from fxlib.errors import ContractError
from fxlib.runtime import CallKind, is_call, is_issue, is_wait, kind_of, kinds, register
from fxlib.runtime.ops import (
    create,
    fetch,
    issue_call,
    issue_fetch,
    remote_call,
    send_gradient,
    start_call,
    track_gradient,
    wait,
)
from fxlib.runtime.ops.calls import FETCH, REMOTE_CALL
from tests.runtime.graphs import Program


def test_each_part_of_a_call_is_told_apart() -> None:
    program = Program("x")
    blocking, issue = program.call("ps", "add"), program.issue("ps", "add")
    waited, local = program.wait(issue), program.local(torch.neg, program.inputs[0])
    fetched = program.local(issue_fetch, program.inputs[0], None)
    waited_fetch = program.local(wait, fetched)
    assert [is_call(node) for node in (blocking, issue, waited, local)] == [True, False, False, False]
    assert [is_issue(node) for node in (blocking, issue, waited, local)] == [False, True, False, False]
    assert [is_wait(node) for node in (blocking, issue, waited, local)] == [False, False, True, False]
    assert {kind_of(node) for node in (blocking, issue, waited)} == {REMOTE_CALL}
    assert {kind_of(fetched), kind_of(waited_fetch)} == {FETCH}
    assert kind_of(local) is None
    assert kind_of(program.inputs[0]) is None


def test_no_operator_is_taken_for_dead_code() -> None:
    program = Program("x")
    for operator in (
        remote_call,
        issue_call,
        start_call,
        fetch,
        issue_fetch,
        create,
        wait,
        track_gradient,
        send_gradient,
    ):
        assert program.local(operator, program.inputs[0]).is_impure()


def test_a_call_whose_result_is_unused_survives_stock_elimination() -> None:
    program = Program("x")
    program.call("ps", "write", "entry")
    module = program.returns(program.inputs[0])
    module.graph.eliminate_dead_code()
    assert any(map(is_call, module.graph.nodes))


def test_an_operator_plays_one_part() -> None:
    with pytest.raises(ContractError, match="another kind"):
        register(CallKind(name="odd", blocking=wait, issue=issue_call, wait=fetch))


def test_registering_a_kind_twice_changes_nothing() -> None:
    before = kinds()
    register(REMOTE_CALL)
    assert kinds() == before
