"""Which gradients a recipe lets travel together, and why others go one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxlib
from fxlib.passes import SendGradients
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import send_gradient, track_gradient
from fxlib.spec.workload import Workload
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME
from tests.wire.support import over_the_wire

BATCH = torch.tensor([1, 2])
ALONE = recipes.Recipe(name="alone", passes=(SendGradients(),))


def sample(*, hook: bool = False, shared: bool = False) -> CapturedModule:
    program, leaves = Program("rows", *(("own",) if hook else ())), []
    for index, name in enumerate("ab"):
        result = program.call("ps0", "read", name, program.inputs[0])
        call: Any = ("ps0", f"{NAME}:take_gradient", (name, program.inputs[0]), {}, None, index)
        leaves.append(program.local(track_gradient, result, *call))
    if hook:
        view = program.graph.call_method("view", (leaves[0], -1))
        program.graph.call_method("register_hook", (view, program.inputs[1]))
    if shared:
        program.local(torch.neg, leaves[1].args[0])
    return program.returns(program.local(torch.add, *leaves))


def operators(module: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.target in {track_gradient, send_gradient}]


def test_the_recipe_lets_gradients_travel_together() -> None:
    assert operators(recipes.apply(sample()).module) == [send_gradient, send_gradient]


def test_the_operator_takes_what_the_other_took_and_keeps_its_node() -> None:
    before, after = sample(), recipes.apply(sample(), ALONE).module
    assert [str(node.args) for node in before.graph.nodes] == [str(node.args) for node in after.graph.nodes]
    assert [node.name for node in before.graph.nodes] == [node.name for node in after.graph.nodes]


def test_gradients_that_distributed_autograd_carries_are_declined_with_the_reason() -> None:
    rewrite = recipes.apply(sample(), ALONE, workload=Workload(batches=[BATCH], mode="distributed"))
    assert not rewrite.changed
    declined = [(each.node, each.reason) for each in rewrite.passes[0].declined]
    assert declined == [("remote_call", Reason.GRADIENT_CARRIED), ("remote_call_1", Reason.GRADIENT_CARRIED)]


@pytest.mark.parametrize("step", [{}, {"accumulation": 4}, {"clip_norm": 1.5}, {"loss_scale": 1024.0}])
def test_whatever_else_the_step_does_is_over_when_gradients_are_pushed(step: dict[str, Any]) -> None:
    assert recipes.apply(sample(), ALONE, workload=Workload(batches=[BATCH], **step)).passes[0].changes == 2


@pytest.mark.parametrize("how", [{"hook": True}, {"shared": True}])
def test_a_hook_on_a_result_and_another_use_of_it_are_no_hindrance(how: dict[str, bool]) -> None:
    assert operators(recipes.apply(sample(**how), ALONE).module) == [send_gradient, send_gradient]


def test_it_travels() -> None:
    module = recipes.apply(sample(), ALONE).module
    decoded = over_the_wire(module)
    assert operators(decoded) == [send_gradient, send_gradient]


def test_the_rewritten_module_says_which_gradients_it_sends() -> None:
    assert "send_gradient" in fxlib.optimize(sample(), ALONE).code
