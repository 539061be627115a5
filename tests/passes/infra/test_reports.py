"""For every call, what was done, why, and what would free it."""

from __future__ import annotations

import pytest
import torch

from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.spec.contract import Contract
from fxlib.spec.report import CallReport
from tests.analysis.sketch import READ, WRITE, Sketch, names


def report(module: CapturedModule, name: str) -> CallReport:
    return next(call for call in recipes.apply(module).calls if call.node == name)


def test_an_unknown_function_is_named_with_the_declaration_that_would_free_it() -> None:
    program = Sketch("x")
    found = report(program.returns(program.call("lookup", program.inputs[0], contract=None)), "lookup")
    assert (found.action, found.reason) == ("left_alone", Reason.UNKNOWN_CONTRACT)
    assert found.remedy == 'declare @fxlib.remote(reads="...") on shop:lookup, or pass contracts={"shop:lookup": ...}'


def test_a_write_says_what_it_writes() -> None:
    program = Sketch("x")
    found = report(program.returns(program.call("push", program.inputs[0], contract=WRITE)), "push")
    assert found.reason is Reason.WRITES_STATE
    assert found.detail == "table"


def test_a_read_behind_an_unknown_call_names_that_call() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    unknown = program.call("mystery", ids, contract=None)
    found = report(program.returns(unknown, program.call("lookup", ids)), "lookup")
    assert found.reason is Reason.ORDERED_AFTER_WRITE
    assert "shop:mystery" in found.remedy


def test_a_read_before_an_unknown_call_names_that_call() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    lookup = program.call("lookup", ids)
    found = report(program.returns(lookup, program.call("mystery", ids, contract=None)), "lookup")
    assert found.reason is Reason.ORDERED_BEFORE_WRITE
    assert "shop:mystery" in found.remedy


def test_a_written_argument_is_the_reason_where_it_is() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    lookup = program.call("lookup", ids)
    written = program.work("written", "add_", ids, 1)
    assert report(program.returns(lookup, written), "lookup").reason is Reason.ARGUMENT_WRITTEN


def test_a_moved_call_says_which_half_moved() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    dense = program.work("dense", torch.sin, x)
    early = program.call("early", ids)
    late = program.call("late", ids)
    module = program.returns(program.work("sum", torch.add, early, dense), late)
    assert report(module, "early").reason is Reason.MOVED
    assert report(module, "early").action == "moved"


def test_the_request_can_declare_and_assume_and_the_rewrite_says_so() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    calls = [program.call(name, ids, contract=None) for name in ("known", "unknown")]
    module = program.returns(*calls, program.work("dense", torch.sin, x))
    declared = recipes.apply(module, contracts={"shop:known": READ}, assume="reads")
    assert names(declared.module) == ["known_issue", "unknown_issue", "dense", "known", "unknown"]
    assert declared.assumptions == (
        "shop:known: reads table, as the request declares",
        "shop:unknown: reads *, as the request assumes of every unknown function",
    )


def test_an_assumed_read_still_comes_after_every_write_to_its_server() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    written = program.call("written", ids, contract=Contract(writes=frozenset({"elsewhere"})))
    module = program.returns(written, program.call("unknown", ids, contract=None))
    assert not recipes.apply(module, assume="reads").changed


def test_a_declared_contract_is_not_overridden() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    module = program.returns(program.work("dense", torch.sin, x), program.call("push", ids, contract=WRITE))
    rewrite = recipes.apply(module, contracts={"shop:push": READ}, assume="pure")
    assert rewrite.assumptions == ()
    assert not rewrite.changed


@pytest.mark.parametrize("recipe", ["schedule", recipes.from_passes([("dead_code", {})])])
def test_every_call_is_reported_once(recipe: str | recipes.Recipe) -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    issued = program.issue("issued", ids)
    program.create("created", ids)
    program.call("called", ids)
    module = program.returns(program.wait("waited", issued))
    assert sorted(call.node for call in recipes.apply(module, recipe).calls) == ["called", "created", "issued"]
