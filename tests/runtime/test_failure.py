"""The exception that a rewritten program raises is the one that the program as captured raises."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.rpc import rpc_sync

import fxlib
from fxlib.runtime.ops import remote_call
from tests.runtime import remote_functions
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME

pytestmark = pytest.mark.usefixtures("servers")
X = torch.arange(4.0)


def log() -> list[str]:
    return [entry for name in ("ps0", "ps1") for entry in remote_call(name, f"{NAME}:read_log", (), {}, None)]


def test_a_call_in_flight_fails_before_a_later_local_node() -> None:
    program = Program("x")
    issue = program.issue("ps0", "fail", "the call's", 0.05)
    broken = program.local(torch.Tensor.view, program.inputs[0], 7)
    module = program.returns((program.wait(issue), broken))
    with pytest.raises(ValueError, match="the call's"):
        module(X)


def test_a_local_node_fails_before_a_later_call_in_flight_and_does_not_wait_for_it() -> None:
    log()
    program = Program("x")
    issue = program.issue("ps0", "held", order=5)
    broken = program.local(torch.Tensor.view, program.inputs[0], 7, order=2)
    module = program.returns((program.wait(issue), broken))
    with pytest.raises(RuntimeError, match="shape"):
        module(X)
    assert log() == []
    remote_call("ps0", f"{NAME}:release", (), {}, None)
    assert log() == ["held"]


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_failing_calls_the_earlier_one_is_raised(first: int) -> None:
    program = Program("x")
    calls = [program.issue("ps0", "fail", "early", 0.1, order=2), program.issue("ps1", "fail", "late", order=3)]
    waited = [program.wait(calls[first]), program.wait(calls[1 - first])]
    with pytest.raises(ValueError, match="early"):
        program.returns(waited)(X)


def test_calls_that_succeed_leave_the_local_error() -> None:
    program = Program("x")
    issue = program.issue("ps0", "slow", 1, 0.05)
    broken = program.local(torch.Tensor.view, program.inputs[0], 7)
    module = program.returns((program.wait(issue), broken))
    with pytest.raises(RuntimeError, match="shape"):
        module(X)


def test_a_local_node_moved_behind_is_run_for_its_error() -> None:
    program = Program("x")
    moved_up = program.local(torch.Tensor.view, program.inputs[0], 7, order=5)
    earlier = program.local(operator.truediv, 1, 0, order=2)
    module = program.returns((moved_up, earlier))
    with pytest.raises(ZeroDivisionError):
        module(X)


def test_a_write_that_the_program_made_before_the_failing_node_is_made() -> None:
    log()
    program = Program("x")
    moved_up = program.local(torch.Tensor.view, program.inputs[0], 7, order=6)
    program.call("ps0", "write", "before", order=2)
    program.call("ps1", "write", "after", order=7)
    module = program.returns(moved_up)
    with pytest.raises(RuntimeError, match="shape"):
        module(X)
    assert log() == ["before"]


class Replied(nn.Module):
    """A server answers with an object of the program's own class before a lookup fails between two writes."""

    def __init__(self, *, needs_reply: bool) -> None:
        super().__init__()
        self.rows, self.needs_reply = nn.Embedding(4, 4), needs_reply

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        reply = rpc_sync("ps1", remote_functions.reply, args=(x,))
        rpc_sync("ps0", remote_functions.write_sum, args=(reply.rows * x,))
        rows: torch.Tensor = self.rows(index * reply.count if self.needs_reply else index)
        rpc_sync("ps0", remote_functions.write_sum, args=(rows,))
        return rows


@pytest.mark.parametrize("needs_reply", [False, True])
def test_the_first_object_of_the_programs_own_changes_no_error_and_no_write(*, needs_reply: bool) -> None:
    log()
    model = Replied(needs_reply=needs_reply)
    outcomes = []
    for module in (model, fxlib.optimize(fxlib.capture(model))):
        with pytest.raises(IndexError, match="index out of range"):
            module(X[1:], torch.tensor([9]))
        outcomes.append(log())
    assert outcomes[0] == outcomes[1] == ["sum 20.0"]


def test_a_refused_call_that_nobody_waits_for_is_not_lost() -> None:
    program = Program("x")
    program.issue("nobody", "add", program.inputs[0])
    with pytest.raises(RuntimeError, match="nobody"):
        program.returns(program.inputs[0])(X)


def test_an_error_keeps_the_users_traceback() -> None:
    program = Program("x")
    module = program.returns(program.local(_user_function, program.inputs[0]))
    with pytest.raises(RuntimeError) as caught:
        module(X)
    assert "_user_function" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_wrong_arguments_are_the_callers_error() -> None:
    with pytest.raises(TypeError, match="missing"):
        Program("x").returns(1)()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_waits_for_nothing() -> None:
    log()
    program = Program("x")
    issue = program.issue("ps0", "held")
    interrupt = program.local(_interrupt)
    module = program.returns((program.wait(issue), interrupt))
    with pytest.raises(KeyboardInterrupt):
        module(X)
    assert log() == []
    remote_call("ps0", f"{NAME}:release", (), {}, None)
    assert log() == ["held"]


def test_a_graph_run_in_another_grad_mode_than_its_captures_leaves_the_callers() -> None:
    program = Program("x")
    program.local(torch._C._set_grad_enabled, False)
    program.local(torch._C._set_grad_enabled, True)
    module = program.returns(program.inputs[0])
    with torch.no_grad():
        module(X)
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("failing", [torch.Tensor.view, _interrupt])
def test_modes_are_left_as_they_were_found(failing: Callable[..., object]) -> None:
    program = Program("x")
    program.local(torch._C._set_grad_enabled, False)
    block = program.local(torch.amp.autocast_mode._enter_autocast, "cpu", torch.bfloat16, True, True)
    broken = program.local(failing, program.inputs[0], 7)
    program.local(torch.amp.autocast_mode._exit_autocast, block)
    module = program.returns(broken)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        module(X)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_the_next_forward_is_not_disturbed() -> None:
    program = Program("x")
    issue = program.issue("ps0", "slow", 1, 0.2)
    local = program.local(torch.Tensor.view, program.inputs[0], 4)
    module = program.returns((program.wait(issue), local))
    with pytest.raises(RuntimeError, match="shape"):
        module(torch.ones(3))
    assert module(X)[0] == 1


def _user_function(x: torch.Tensor) -> torch.Tensor:
    return x.view(7)
