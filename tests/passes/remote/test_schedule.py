"""Where the schedule puts issues and waits."""

from __future__ import annotations

import operator

import torch
from torch import nn

from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime.ops import calls
from fxlib.spec.contract import PURE, Contract
from tests.analysis.sketch import READ, WRITE, Sketch, names, reason, schedule


def test_an_issue_rises_with_all_the_work_it_needs() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    dense = program.work("dense", torch.sin, x)
    shifted = program.work("shifted", torch.add, ids, 1)
    doubled = program.work("doubled", torch.mul, shifted, 2)
    found = program.call("found", doubled)
    module = program.returns(program.work("both", torch.add, dense, found))
    assert schedule(module) == ["shifted", "doubled", "found_issue", "dense", "found", "both"]


def test_a_wait_sinks_below_work_that_does_not_need_it() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    found = program.call("found", ids)
    pooled = program.work("pooled", "sum", found, 0)
    dense = program.work("dense", torch.sin, x)
    module = program.returns(program.work("both", torch.add, dense, pooled))
    assert schedule(module) == ["found_issue", "dense", "found", "pooled", "both"]


def test_work_on_a_result_runs_before_the_next_wait() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    pooled = [program.work(f"p{each}", "sum", program.call(f"c{each}", ids), 0) for each in range(2)]
    module = program.returns(*pooled)
    assert schedule(module) == ["c0_issue", "c1_issue", "c0", "p0", "c1", "p1"]


def test_a_call_that_needs_the_result_of_another_is_issued_right_after_that_wait() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    first = program.call("first", ids)
    one = program.work("one", torch.sin, x)
    second = program.call("second", program.work("then", torch.add, first, 1))
    two = program.work("two", torch.cos, one)
    module = program.returns(second, two)
    assert schedule(module) == ["first_issue", "one", "first", "then", "second_issue", "two", "second"]


def test_a_chain_of_calls_without_other_work_stays_as_it_is() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    first = program.call("first", x)
    middle = program.work("middle", torch.sin, first)
    module = program.returns(program.call("second", middle))
    rewrite = recipes.apply(module)
    assert not rewrite.changed
    assert rewrite.module is module
    assert {call.reason for call in rewrite.calls} == {Reason.NOTHING_TO_OVERLAP}


def test_a_call_that_gains_nothing_turns_back_into_a_blocking_call() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    found = program.call("found", ids)
    dense = program.work("dense", torch.sin, x)
    both = program.work("both", torch.add, dense, found)
    module = program.returns(program.call("last", both))
    assert schedule(module) == ["found_issue", "dense", "found", "both", "last"]


def test_a_write_is_issued_after_all_earlier_waits_and_where_it_stands() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    read = program.call("read", ids)
    before = program.work("before", torch.sin, x)
    written = program.call("written", ids, contract=WRITE)
    after = program.work("after", torch.cos, x)
    module = program.returns(read, before, written, after)
    assert schedule(module) == ["read_issue", "before", "read", "written_issue", "after", "written"]


def test_a_read_waits_for_a_write_of_what_it_reads() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    written = program.call("written", ids, contract=WRITE)
    read = program.call("read", ids)
    module = program.returns(written, read, program.work("dense", torch.sin, x))
    rewrite = recipes.apply(module)
    assert names(rewrite.module) == ["written", "read_issue", "dense", "read"]


def test_a_read_passes_a_write_elsewhere() -> None:
    elsewhere = {"other server": ("ps1", READ), "other state": ("ps0", Contract(reads=frozenset({"clock"})))}
    for to, contract in elsewhere.values():
        program = Sketch("ids")
        (ids,) = program.inputs
        written = program.call("written", ids, contract=WRITE)
        module = program.returns(written, program.call("read", ids, to=to, contract=contract))
        assert schedule(module) == ["read_issue", "written", "read"]


def test_a_read_does_not_pass_a_write_on_a_server_that_only_the_run_can_tell() -> None:
    program = Sketch("ids", "to")
    ids, to = program.inputs
    written = program.call("written", ids, to=to, contract=WRITE)
    module = program.returns(written, program.call("read", ids))
    rewrite = recipes.apply(module)
    assert names(rewrite.module) == ["written", "read"]
    assert reason(rewrite, "read") is Reason.UNKNOWN_DESTINATION


def test_a_call_without_a_contract_is_split_and_no_other_call_crosses_it() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    first = program.call("first", ids, contract=None)
    second = program.call("second", ids, contract=None)
    module = program.returns(first, second, program.work("dense", torch.sin, x))
    assert schedule(module) == ["first", "second_issue", "dense", "second"]


def test_a_pure_call_crosses_every_other_call_but_one_that_may_change_its_argument() -> None:
    for of_its_own, expected in ((True, ["second_issue", "first"]), (False, ["first_issue", "second_issue", "first"])):
        program = Sketch("ids")
        (ids,) = program.inputs
        argument = program.work("argument", torch.add, ids, 1)
        first = program.call("first", ids, contract=None)
        second = program.call("second", argument if of_its_own else ids, contract=PURE)
        assert schedule(program.returns(first, argument, second)) == ["argument", *expected, "second"]


def test_nothing_crosses_an_opaque_callable() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    before = program.work("before", torch.sin, x)
    opaque = program.work("opaque", print, x)
    found = program.call("found", ids)
    module = program.returns(before, opaque, found)
    rewrite = recipes.apply(module)
    assert names(rewrite.module) == ["before", "opaque", "found"]
    assert reason(rewrite, "found") is Reason.OPAQUE_NEIGHBOUR


def test_nothing_crosses_the_ends_of_a_grad_mode_block() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    dense = program.work("dense", torch.sin, x)
    program.work("off", torch._C._set_grad_enabled, False)
    found = program.call("found", ids)
    program.work("on", torch._C._set_grad_enabled, True)
    module = program.returns(dense, found)
    rewrite = recipes.apply(module)
    assert names(rewrite.module) == ["dense", "off", "found", "on"]
    assert reason(rewrite, "found") is Reason.MODE_BLOCK


def test_a_programs_own_asynchronous_call_is_scheduled_too() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    dense = program.work("dense", torch.sin, x)
    issued = program.issue("issued", ids)
    found = program.wait("found", issued)
    more = program.work("more", torch.cos, x)
    module = program.returns(dense, program.work("both", torch.add, found, more))
    assert schedule(module) == ["issued", "dense", "more", "found", "both"]


def test_an_issued_call_whose_future_goes_astray_stays_where_it_is() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    dense = program.work("dense", torch.sin, x)
    issued = program.issue("issued", ids)
    module = program.returns(dense, issued)
    rewrite = recipes.apply(module)
    assert not rewrite.changed
    assert reason(rewrite, "issued") is Reason.ALREADY_ASYNC


def test_an_rref_is_created_early_and_fetched_late() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    dense = program.work("dense", torch.sin, x)
    rref = program.create("rref", ids)
    found = program.fetch("found", rref)
    module = program.returns(found, dense)
    assert schedule(module) == ["rref", "found_issue", "dense", "found"]


def test_uses_of_a_tensor_that_takes_a_gradient_keep_their_order() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    dense = program.work("dense", torch.sin, x)
    taken = program.work("taken", torch.mul, x, 2)
    module = program.returns(dense, program.call("found", taken))
    assert schedule(module) == ["dense", "taken", "found"]


def test_uses_of_integers_do_not() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    x.meta["requires_grad"] = False
    dense = program.work("dense", torch.sin, x)
    taken = program.work("taken", torch.mul, x, 2)
    module = program.returns(dense, program.call("found", taken))
    assert schedule(module) == ["taken", "found_issue", "dense", "found"]


def test_uses_of_a_shared_modules_parameters_keep_their_order() -> None:
    root = nn.Module()
    root.tower = nn.Linear(4, 4)
    program = Sketch("x", "y", root=root)
    x, y = program.inputs
    dense = program.module("dense", "tower", x)
    query = program.module("query", "tower", y)
    module = program.returns(dense, program.call("found", query))
    assert schedule(module) == ["dense", "query", "found"]


def test_what_may_return_its_argument_shares_the_order_of_its_uses() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    first = program.work("first", torch.sin, x)
    same = program.work("same", "contiguous", x)
    second = program.work("second", torch.cos, same)
    module = program.returns(first, program.call("found", second))
    assert schedule(module) == ["first", "same", "second", "found"]


def test_what_may_return_any_of_its_arguments_shares_the_order_of_the_uses_of_each() -> None:
    for together in (torch.broadcast_tensors, torch.atleast_1d, operator.add):
        program = Sketch("x", "y")
        x, y = program.inputs
        arguments = (program.work("parts", "chunk", x, 2), (y,)) if together is operator.add else (x, y)
        both = program.work("both", together, *arguments)
        first = program.work("first", torch.sin, y)
        second = program.work("second", torch.cos, program.work("item", operator.getitem, both, -1))
        order = schedule(program.returns(first, program.call("found", second)))
        assert order.index("first") < order.index("second")


def test_random_operators_keep_their_order() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    dropped = program.work("dropped", nn.functional.dropout, x)
    noise = program.work("noise", torch.rand_like, ids)
    module = program.returns(dropped, program.call("found", noise))
    assert schedule(module) == ["dropped", "noise", "found"]


def test_a_write_to_an_argument_in_flight_waits_for_the_call() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    found = program.call("found", ids)
    view = program.work("view", "view", ids, -1)
    written = program.work("written", "add_", view, 1)
    dense = program.work("dense", torch.sin, x)
    module = program.returns(found, written, dense)
    assert schedule(module) == ["found_issue", "view", "found", "written", "dense"]


def get(key: str, x: torch.Tensor) -> torch.Tensor:
    """A blocking client of the user's own."""
    return x


def get_later(key: str, x: torch.Tensor) -> torch.Tensor:
    return x


def join(future: torch.Tensor) -> torch.Tensor:
    return future


def test_a_users_own_blocking_client_is_scheduled_by_the_same_machinery() -> None:
    calls.register(calls.CallKind(name="own client", blocking=get, issue=get_later, wait=join))
    program = Sketch("x", "ids")
    x, ids = program.inputs
    dense = program.work("dense", torch.sin, x)
    found = program.work("found", get, "key", ids)
    found.meta["contract"] = READ
    module = program.returns(dense, found)
    assert schedule(module) == ["found_issue", "dense", "found"]


def test_what_a_users_own_client_names_first_is_no_server() -> None:
    calls.register(calls.CallKind(name="own client", blocking=get, issue=get_later, wait=join))
    program = Sketch("x", "ids")
    x, ids = program.inputs
    written = program.work("written", get, "one", ids)
    read = program.work("read", get, "other", ids)
    written.meta["contract"], read.meta["contract"] = WRITE, READ
    assert schedule(program.returns(written, read, program.work("dense", torch.sin, x))) == [
        *("written", "read_issue", "dense", "read")
    ]
