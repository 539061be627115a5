"""Which calls may run ahead of their step, which way, and what is said of the others."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn

import fxlib
from fxlib.analysis.effects.prologue import CallAhead, Way, calls_ahead
from fxlib.analysis.effects.resources import ServerState
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import track_gradient
from fxlib.spec.contract import Contract
from fxlib.wire import OpaqueRRef
from tests.analysis.sketch import READ, WRITE, Sketch

PURE = Contract(pure=True)
HERE = "tests.analysis.effects.test_prologue"


@fxlib.remote(writes="table")
def push_table(ids: torch.Tensor, gradient: torch.Tensor) -> None:
    """Takes a gradient."""


@fxlib.remote(writes="other")
def push_other(ids: torch.Tensor, gradient: torch.Tensor) -> None:
    """Takes a gradient."""


def push_undeclared(ids: torch.Tensor, gradient: torch.Tensor) -> None:
    """Takes a gradient, and may do anything."""


def only(module: CapturedModule) -> CallAhead:
    (found,) = calls_ahead(module)
    return found


def lookup_of(program: Sketch, value: object, **options: object) -> CallAhead:
    """Return what is said of a call that sends a value, behind what the program holds already."""
    call = program.call("call", value, **options)  # type: ignore[arg-type]
    return next(each for each in calls_ahead(program.returns(call)) if each.name == "call")


def test_a_read_of_what_local_work_makes_of_inputs_may_run_ahead() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    found = lookup_of(program, program.work("moved", torch.add, ids, 3))
    assert (found.way, found.reason.name) == (Way.NOTHING_WRITTEN, "RUNS_AHEAD")
    assert [node.name for node in found.prologue] == ["ids", "moved"]


def test_the_rest_of_a_model_may_be_opaque() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    program.work("anything", print, x)
    assert lookup_of(program, ids).way is Way.NOTHING_WRITTEN


@pytest.mark.parametrize(
    "gradient, way",
    [("push_table", Way.BEHIND_PUSH), ("push_other", Way.NOTHING_WRITTEN), ("push_undeclared", Way.BEHIND_PUSH)],
)
def test_what_a_push_of_the_same_server_writes_is_read_behind_it(gradient: str, way: Way) -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    call = program.call("call", ids)
    tracked = program.work("tracked", track_gradient, call, "ps0", f"{HERE}:{gradient}", (ids,), {}, None, 0)
    found = only(program.returns(tracked))
    assert found.way is way
    assert (gradient in found.detail) == (way is Way.BEHIND_PUSH)


def test_a_push_to_another_server_writes_nothing_that_is_read() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    call = program.call("call", ids)
    tracked = program.work("tracked", track_gradient, call, "ps1", f"{HERE}:push_table", (ids,), {}, None, 0)
    assert only(program.returns(tracked)).way is Way.NOTHING_WRITTEN


def test_a_buffer_may_be_sent_and_a_parameter_may_not() -> None:
    root = nn.Module()
    root.register_buffer("offsets", torch.arange(4))
    root.weight = nn.Parameter(torch.ones(4))
    program = Sketch("ids", root=root)
    (ids,) = program.inputs
    assert lookup_of(program, program.work("sum", operator.add, ids, program.state("offsets"))).way is not None
    program = Sketch("ids", root=root)
    (ids,) = program.inputs
    found = lookup_of(program, program.work("sum", operator.add, ids, program.state("weight")))
    assert (found.way, found.reason.name, found.detail) == (None, "AHEAD_NEEDS_STATE", "weight")


def test_the_weights_of_a_layer_change_with_the_step() -> None:
    program = Sketch("x", root=nn.Sequential(nn.Linear(4, 4)))
    (x,) = program.inputs
    assert lookup_of(program, program.module("layer", "0", x)).reason.name == "AHEAD_NEEDS_STATE"


def test_what_is_drawn_at_random_is_drawn_in_its_step() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    found = lookup_of(program, program.work("noise", torch.rand_like, x))
    assert (found.reason.name, found.detail) == ("AHEAD_RANDOM", "noise")


def test_what_another_call_returned_is_not_known_ahead() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    found = lookup_of(program, program.call("first", ids, contract=PURE))
    assert (found.reason.name, found.detail) == ("AHEAD_NEEDS_RESULT", "first")


def test_what_an_opaque_callable_makes_or_is_given_is_not_known_ahead() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    assert lookup_of(program, program.work("made", print, ids)).reason.name == "AHEAD_OPAQUE"
    program = Sketch("ids")
    (ids,) = program.inputs
    moved = program.work("moved", torch.add, ids, 1)
    program.work("given", print, moved)
    assert lookup_of(program, moved).reason.name == "AHEAD_OPAQUE"


def test_what_the_program_writes_to_is_not_known_ahead() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    program.work("written", "add_", x, 1)
    assert lookup_of(program, x).reason.name == "AHEAD_ARGUMENT_WRITTEN"


@pytest.mark.parametrize("contract", [WRITE, None], ids=["declared", "undeclared"])
def test_what_the_graph_itself_writes_is_read_where_the_program_reads_it(contract: Contract | None) -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    program.call("writer", ids, contract=contract)
    found = lookup_of(program, ids)
    assert (found.way, found.reason.name, found.detail) == (None, "AHEAD_WRITTEN", "shop:writer")
    assert bool(found.remedy) == (contract is None)


def test_a_write_to_other_state_is_no_hindrance() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    program.call("writer", ids, to="ps1", contract=WRITE)
    assert lookup_of(program, ids).way is Way.NOTHING_WRITTEN


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"contract": None}, "UNKNOWN_CONTRACT"),
        ({"contract": WRITE}, "WRITES_STATE"),
    ],
)
def test_what_a_contract_does_not_allow_stays(options: dict[str, object], reason: str) -> None:
    program = Sketch("ids")
    found = lookup_of(program, program.inputs[0], **options)
    assert (found.way, found.reason.name) == (None, reason)


def test_a_server_that_only_the_run_knows_is_not_read_ahead() -> None:
    program = Sketch("ids", "server")
    ids, server = program.inputs
    found = lookup_of(program, ids, to=server)
    assert (found.reason.name, bool(found.remedy)) == ("UNKNOWN_DESTINATION", True)


@pytest.mark.parametrize("owner", ["ps0", ""], ids=["known", "unknown"])
def test_a_call_goes_to_an_rref_that_the_module_holds_or_to_its_owner(owner: str) -> None:
    root: Any = nn.Module()
    root.rref = OpaqueRRef("rref", owner, here=False)
    for by_owner in (False, True):
        program = Sketch("ids", root=root)
        rref = program.state("rref")
        to = program.work("to", "owner", rref) if by_owner else rref
        found = lookup_of(program, program.inputs[0], to=to)
        assert (found.way, found.reason.name) == (Way.NOTHING_WRITTEN, "RUNS_AHEAD")
        assert found.reads == {ServerState(owner or None, "table")}


def test_collectives_stay() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    program.collective("reduced", x)
    assert only(program.returns(x)).reason.name == "AHEAD_KIND"


def test_calls_of_a_rewritten_module_are_told_by_their_messages() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    calls = [program.call(f"call{place}", ids, contract=READ) for place in range(3)]
    rewritten = recipes.apply(program.returns(*calls)).module
    found = calls_ahead(rewritten)
    assert {each.way for each in found} == {Way.NOTHING_WRITTEN}
    assert all(each.node.graph is rewritten.graph for each in found)


def test_an_analysis_lists_the_calls_and_what_would_free_them() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    module = program.returns(program.call("free", ids, contract=PURE), program.call("bound", ids, contract=None))
    told = str(fxlib.analyze(module, (torch.arange(3),)))
    assert "free: may run ahead of its step" in told
    assert "declare @fxlib.remote(reads=...) on shop:bound" in told
