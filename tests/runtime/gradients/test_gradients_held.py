"""A gradient that somebody else holds when it comes: what is pushed is what came, whatever becomes of the other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxlib.runtime.ops import track_gradient
from fxlib.runtime.push_gradients import push_gradients
from fxlib.runtime.tracking.autograd_node import Backward, tracked
from tests.runtime.gradients.pushing import ROWS, log
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME

pytestmark = pytest.mark.usefixtures("servers", "empty_logs")


def given_by_the_program(result: Tensor) -> Tensor:
    gradient = torch.full_like(result, 2.0)
    result.backward(gradient)
    return gradient


def kept_by_a_hook(result: Tensor) -> Tensor:
    kept: list[Tensor] = []
    result.register_hook(kept.append)
    (result * 2.0).sum().backward()
    return kept[0]


def kept_by_the_hook_of_another_tensor(result: Tensor) -> Tensor:
    kept: list[Tensor] = []
    other = torch.zeros_like(result).requires_grad_()
    other.register_hook(kept.append)
    ((result + other) * 2.0).sum().backward()
    return kept[0]


@pytest.mark.parametrize("held", [given_by_the_program, kept_by_a_hook, kept_by_the_hook_of_another_tensor])
def test_what_the_program_does_to_a_gradient_that_it_holds_does_not_reach_the_server(
    held: Callable[[Tensor], Tensor],
) -> None:
    program = Program("rows")
    result = program.call("ps0", "read", "a", program.inputs[0])
    call: Any = ("ps0", f"{NAME}:take_gradient", ("a", program.inputs[0]), {}, None, 0)
    module = program.returns(program.local(track_gradient, result, *call))
    for _ in range(2):
        held(module(ROWS)).zero_()
        push_gradients(module)
    assert log() == ["a [2.0, 2.0]"] * 2


@pytest.mark.parametrize("in_a_node", [1, 2])
def test_two_tensors_of_a_result_whose_gradients_are_one_get_one_each(in_a_node: int) -> None:
    given = [torch.ones(3) for _ in range(in_a_node)]
    made = [tracked(given, Backward(), in_distributed_autograd=False) for _ in range(2 // in_a_node)]
    outputs, slots = zip(*[each for of_node in made for each in of_node], strict=True)
    (sum(outputs) * 2.0).sum().backward()
    gradients = [slot.gradient for slot in slots]
    assert all(each is not None and torch.equal(each, torch.full((3,), 2.0)) for each in gradients)
    assert len({each.data_ptr() for each in gradients if each is not None}) == 2
