"""What may be scheduled is what is registered: one row for each operator, and all who ask read the same."""

from __future__ import annotations

import inspect

import pytest
import torch

from fxlib.analysis.effects.node_kinds import Behaviours, Part
from fxlib.analysis.operators.schemas import facts_of
from fxlib.errors import ContractError
from fxlib.reasons import Reason
from fxlib.runtime import CallKind, is_call, is_issue, is_wait, kind_of, kinds, register
from fxlib.runtime.ops import (
    calls,
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
from fxlib.runtime.ops.registry import BY_LABEL, OPERATORS, Role, RuntimeOperator
from fxlib.wire.targets import function_name, functions
from tests.runtime.graphs import Program

PARTS = {
    Role.CALL: Part.CALL,
    Role.ISSUE: Part.FENCE,  # it has no wait
    Role.WAIT: Part.FENCE,  # nor has it an issue
    Role.CREATE: Part.ISSUE,
    Role.LIMIT: Part.INPUT,
    Role.REFERENCE: Part.LOCAL,
    Role.TRACK: Part.LOCAL,
    Role.CHECK: Part.LOCAL,
    Role.LOOKUP: Part.LOCAL,
}


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


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.label)
def test_a_row_says_what_the_function_takes(row: RuntimeOperator) -> None:
    names = list(inspect.signature(row.function).parameters)
    if row.arguments is not None:
        assert len(names) == row.arguments
    if row.function_at is not None:
        assert "function" in names[row.function_at] or names[row.function_at] in ("name", "gradient")
    if row.destination_at is not None:
        assert names[row.destination_at] in ("to", "rref")


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.label)
def test_a_row_travels_under_its_label(row: RuntimeOperator) -> None:
    assert functions()[row.label] is row.function
    assert function_name(row.function) == row.label


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.label)
def test_a_row_says_what_an_operator_does_to_a_program(row: RuntimeOperator) -> None:
    program = Program("x")
    node = program.local(row.function, *program.inputs, *[()] * ((row.arguments or 1) - 1))
    module = program.returns(node)
    behaviour = Behaviours(module).of(node)
    assert behaviour.fence is not Reason.OPAQUE_NEIGHBOUR
    assert behaviour.part is PARTS[row.role]
    assert (facts_of(row.function) is not None) == (row.role in {Role.CHECK, Role.LOOKUP})
    assert node.is_impure() == (row.role not in {Role.REFERENCE, Role.CHECK, Role.LOOKUP})


def test_the_operators_of_call_kinds_are_rows() -> None:
    own = {each for kind in calls.kinds() for each in kind.operators if each.__module__.startswith("fxlib.")}
    assert own == {row.function for row in OPERATORS if row.role in (Role.CALL, Role.ISSUE, Role.WAIT)}
    assert len(BY_LABEL) == len(OPERATORS)
