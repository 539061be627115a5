"""A push that takes longer than its timeout fails for the program, and none is made after it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import send_gradient
from fxlib.runtime.push_gradients import push_gradients
from tests.runtime.gradients.pushing import backward, log
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME

pytestmark = pytest.mark.usefixtures("servers", "empty_logs")


@pytest.mark.slow
def test_no_push_is_made_after_one_that_took_longer_than_its_timeout() -> None:
    module = slow_in_the_middle("very_slowly", timeout_s=1.0)
    for _ in range(2):
        backward(module)
        with pytest.raises(RuntimeError, match="set timeout"):
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
