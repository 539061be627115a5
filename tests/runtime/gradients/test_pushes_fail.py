"""A push that fails or takes too long: the program learns of it as it would have, and of what was made all the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import rpc

from fxlib.errors import FxlibError
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import send_gradient, track_gradient
from fxlib.runtime.push_gradients import push_gradients
from fxlib.runtime.tracking.flow_control import DEADLINES
from tests.runtime.gradients.pushing import ROWS, backward, log, messages, model
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME

pytestmark = pytest.mark.usefixtures("servers", "empty_logs")


@pytest.mark.parametrize("failing", ["fail_to_take", "fail_to_take_alone"])
def test_an_error_of_a_push_is_the_one_of_the_blocking_push_and_stops_its_server(failing: str) -> None:
    pushes = (("ps0", "take_gradient", "a"), ("ps0", failing, "b"), ("ps0", "take_gradient", "c"))
    found = []
    for operator in (track_gradient, send_gradient):
        module = model(*pushes, operator=operator)
        backward(module)
        with pytest.raises(ValueError, match="b is refused") as raised:
            push_gradients(module)
        assert not hasattr(raised.value, "__notes__")
        found.append((str(raised.value).partition("Traceback")[0], log()))  # what the server said, and what it took
    assert found[0] == found[1]
    assert found[0][1] == ["a [1.0, 1.0]"]


def test_the_first_error_in_program_order_is_raised_whatever_comes_first() -> None:
    module = model(("ps0", "take_slowly", "a"), ("ps0", "fail_to_take", "b"), ("ps1", "fail_to_take", "c"))
    backward(module)
    with pytest.raises(ValueError, match="b is refused"):
        push_gradients(module)


def test_an_error_says_which_pushes_behind_it_were_made_and_none_is_under_way() -> None:
    module = model(("ps0", "fail_to_take", "a"), ("ps1", "take_slowly", "b"), ("ps0", "take_gradient", "c"))
    backward(module)
    with pytest.raises(ValueError, match="a is refused") as raised:
        push_gradients(module)
    (note,) = raised.value.__notes__
    assert note.endswith(f"pushes behind the one that failed were made with it: {NAME}:take_slowly on 'ps1' (call 1)")
    assert DEADLINES.in_flight == 0
    assert (log(), log("ps1")) == ([], ["b [2.0, 2.0]"])


def test_a_failure_ends_its_part_and_what_has_not_left_for_any_server() -> None:
    module = model(
        ("ps0", "take_part", "refused"),
        ("ps0", "take_part", "b"),
        ("ps0", "take_part", "refused"),
        ("ps1", "take_alone", "c"),
        ("ps1", "take_alone", "d"),
    )
    backward(module)
    with pytest.raises(ValueError, match="refused at 1"):
        push_gradients(module)
    assert (log(), log("ps1")) == (["b [2.0, 2.0]"], ["c [4.0, 4.0]"])


def test_after_a_failure_the_next_step_is_pushed_as_if_nothing_had_happened() -> None:
    module = model(("ps0", "take_gradient", "a"), ("ps1", "fail_to_take", "b"))
    for _ in range(2):
        backward(module)
        with pytest.raises(ValueError, match="b is refused"):
            push_gradients(module)
    assert log() == ["a [1.0, 1.0]"] * 2


def test_a_function_that_nobody_knows_fails_where_the_program_pushes() -> None:
    module = model(("ps0", "take_gradient", "a"), ("ps0", "no_such_function", "b"))
    backward(module)
    with pytest.raises(FxlibError, match="no_such_function"):
        push_gradients(module)
    assert log() == ["a [1.0, 1.0]"]


class _Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("this stays here")


def test_a_message_that_cannot_be_sent_fails_at_the_push_that_is_to_blame() -> None:
    program, parts = Program("rows", "unsendable"), []
    for index, stuff in enumerate((program.inputs[0], program.inputs[1], program.inputs[0])):
        result = program.call("ps0", "read", "a", program.inputs[0])
        call: Any = ("ps0", f"{NAME}:take_gradient", (stuff, program.inputs[0]), {}, None, index)
        parts.append(program.local(send_gradient, result, *call))
    module = program.returns(program.local(torch.cat, parts, 0))
    module(ROWS, _Unsendable()).sum().backward()
    with messages() as sent, pytest.raises(TypeError, match="stays here"):
        push_gradients(module)
    assert [function.__name__ for _, function in sent] == ["run_in_order", "take_gradient", "take_gradient"]
    assert len(log()) == 1


def test_of_a_backward_that_raised_nothing_is_pushed_whatever_it_had_brought_by_then() -> None:
    def run(operator: Any) -> list[str]:
        program, parts = Program("rows"), []
        for index in range(3):
            result = program.call("ps0", "read", "abc"[index], program.inputs[0])
            call: Any = ("ps0", f"{NAME}:take_gradient", ("abc"[index], program.inputs[0]), {}, None, index)
            parts.append(program.local(torch.mul, program.local(operator, result, *call), 2.0))
        module = program.returns(tuple(parts))
        first, second, third = module(ROWS)
        first.register_hook(_refuse)  # reached after the others
        with pytest.raises(ArithmeticError):
            (first.sum() + second.sum() + third.sum()).backward()
        assert log() == []
        push_gradients(module)
        torch.stack(module(ROWS)).sum().backward()
        push_gradients(module)
        return log()

    assert run(track_gradient) == run(send_gradient) == [f"{name} [2.0, 2.0]" for name in "abc"]


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
    backward(module)
    limits: list[float] = []
    with limits_given(limits):
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


@pytest.mark.slow
@pytest.mark.parametrize("timeout_s", [0.5, 1.0])  # on the clock of both, and on the server's alone
def test_no_push_is_made_after_one_that_took_longer_than_its_timeout(timeout_s: float) -> None:
    module = slow_in_the_middle("very_slowly", timeout_s)
    for _ in range(2):
        backward(module)
        with pytest.raises(RuntimeError, match=rf"set timeout \({1000 * timeout_s:.0f} ms\)"):
            push_gradients(module)
        assert until("b") == ["a [1.0, 1.0]", "b [2.0, 2.0]"]
    assert log() == []


def test_pushes_with_time_enough_are_all_made() -> None:
    module = slow_in_the_middle("slowly", timeout_s=20.0)
    for _ in range(2):
        backward(module)
        push_gradients(module)
    assert [entry[0] for entry in log()] == ["a", "b", "c"] * 2


def slow_in_the_middle(how: str, timeout_s: float) -> CapturedModule:
    program, parts = Program("rows"), []
    for index, (name, function) in enumerate(zip("abc", ("gradient", how, "gradient"), strict=True)):
        result = program.call("ps0", "read", name, program.inputs[0])
        call: Any = ("ps0", f"{NAME}:take_{function}", (name, program.inputs[0]), {}, timeout_s, index)
        parts.append(program.local(torch.mul, program.local(send_gradient, result, *call), float(index + 1)))
    return program.returns(program.local(torch.cat, parts, 0))


def until(name: str) -> list[str]:
    """Return what has reached the server as soon as this has."""
    found: list[str] = []
    deadline = time.monotonic() + 200
    while not any(entry.startswith(name) for entry in found) and time.monotonic() < deadline:
        found += log()
        time.sleep(0.01)
    return found
