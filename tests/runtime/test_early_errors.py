"""A push that left from inside backward and fails: the program learns of it where it pushes, as it would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import rpc

from fxlib.errors import FxlibError
from fxlib.gradients import push_gradients
from fxlib.runtime import remote_call, send_gradient, track_gradient
from tests.runtime.early import ROWS, backward, log, messages, model
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME

pytestmark = pytest.mark.usefixtures("servers", "nothing_under_way")


@pytest.mark.parametrize("failing", ["fail_to_take", "fail_to_take_alone"])
def test_an_error_of_a_push_is_the_one_of_the_blocking_push_and_stops_its_server(failing: str) -> None:
    pushes = (("ps0", "take_gradient", "a"), ("ps0", failing, "b"), ("ps0", "take_gradient", "c"))
    module = model(*pushes, operator=track_gradient)
    backward(module)
    with pytest.raises(ValueError, match="b is refused") as blocking:
        push_gradients(module)
    expected = log()
    module = model(*pushes)
    for _ in range(2):
        backward(module)
        with pytest.raises(ValueError, match="b is refused") as early:
            push_gradients(module)
        assert _told(early.value) == _told(blocking.value)
        assert log() == expected
    assert expected == ["a [1.0, 1.0]"]


def _told(error: Exception) -> str:
    """What the server said, without its traceback."""
    return str(error).partition("Traceback")[0]


def test_the_first_error_in_program_order_is_raised_whatever_comes_first() -> None:
    pushes = (("ps0", "take_slowly", "a"), ("ps0", "fail_to_take", "b"), ("ps1", "fail_to_take", "c"))
    module = model(*pushes)
    for _ in range(2):
        backward(module)
        with pytest.raises(ValueError, match="b is refused"):
            push_gradients(module)


def test_after_an_error_a_call_waits_for_what_is_still_on_its_way_to_its_server() -> None:
    module = model(("ps0", "fail_to_take", "a"), ("ps1", "take_slowly", "b"))
    for _ in range(2):
        backward(module)
        with pytest.raises(ValueError, match="a is refused"):
            push_gradients(module)
    assert remote_call("ps1", f"{NAME}:read_log", (), {}, None) == ["b [2.0, 2.0]"]


def test_a_function_that_nobody_knows_fails_where_the_program_pushes() -> None:
    module = model(("ps0", "no_such_function", "a"))
    for _ in range(2):
        backward(module)
        with pytest.raises(FxlibError, match="no_such_function"):
            push_gradients(module)


def test_after_a_backward_that_failed_halfway_the_push_is_of_what_came() -> None:
    def run(operator: Any) -> list[list[str]]:
        program, parts = Program("rows"), []
        for index, server in enumerate(("ps0", "ps1")):
            result = program.call(server, "read", "ab"[index], program.inputs[0])
            call: Any = (server, f"{NAME}:take_gradient", ("ab"[index], program.inputs[0]), {}, None, index)
            parts.append(program.local(torch.mul, program.local(operator, result, *call), 2.0))
        module = program.returns(tuple(parts))
        torch.stack(module(ROWS)).sum().backward()
        push_gradients(module)
        first, second = module(ROWS)
        first.register_hook(_refuse)  # reached after the other
        with messages() as sent, pytest.raises(ArithmeticError):
            (first.sum() + second.sum()).backward()
        assert [to for to, _ in sent] == ([] if operator is track_gradient else ["ps1"])
        push_gradients(module)
        return [log("ps0"), log("ps1")]

    assert run(track_gradient) == run(send_gradient) == [["a [2.0, 2.0]"], ["b [2.0, 2.0]"] * 2]


def _refuse(gradient: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError(f"no gradient {gradient}")


@pytest.mark.parametrize(
    "names, limit_s",
    [("aaa", 30.0), ("abc", 20.0), ("abab", 40.0), ("abcdefghijklmnopq", 30.0)],
)
def test_a_message_may_take_as_long_as_the_pushes_that_wait_for_one_another(names: str, limit_s: float) -> None:
    program, parts = Program("rows"), []
    for index, name in enumerate(names):
        result = program.call("ps0", "read", name, program.inputs[0])
        call: Any = ("ps0", f"{NAME}:take_part", (name, program.inputs[0]), {}, 10.0, index)
        parts.append(program.local(send_gradient, result, *call))
    module = program.returns(program.local(torch.cat, parts, 0))
    limits: list[float] = []
    for _ in range(2):
        with limits_given(limits):
            backward(module)
        push_gradients(module)
    assert limits == [limit_s]


@contextmanager
def limits_given(limits: list[float]) -> Iterator[None]:
    """Note the timeouts, in seconds, of what is sent."""
    real = rpc.rpc_async

    def noting(to: str, function: Any, *, args: Any, timeout: float, **rest: Any) -> Any:
        limits.append(timeout)
        return real(to, function, args=args, timeout=timeout, **rest)

    with mock.patch.object(rpc, "rpc_async", noting):
        yield
