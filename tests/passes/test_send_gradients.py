"""Which gradients a recipe lets leave from inside backward, and why others stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxlib
from fxlib import recipes, wire
from fxlib.passes import SendGradients
from fxlib.reasons import Reason
from fxlib.runtime import CapturedModule, send_gradient, track_gradient
from fxlib.workload import Workload
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME

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


def test_the_recipe_lets_gradients_leave_early() -> None:
    assert operators(recipes.apply(sample()).module) == [send_gradient, send_gradient]


def test_the_operator_takes_what_the_other_took_and_keeps_its_node() -> None:
    before, after = sample(), recipes.apply(sample(), ALONE).module
    assert [str(node.args) for node in before.graph.nodes] == [str(node.args) for node in after.graph.nodes]
    assert [node.name for node in before.graph.nodes] == [node.name for node in after.graph.nodes]


@pytest.mark.parametrize(
    "step, reason, detail",
    [
        ({"accumulation": 4}, Reason.GRADIENT_ACCUMULATED, "accumulation=4"),
        ({"clip_norm": 1.5}, Reason.GRADIENT_CLIPPED, "clip_norm=1.5"),
        ({"loss_scale": 1024.0}, Reason.GRADIENT_SCALED, "loss_scale=1024"),
        ({"mode": "distributed"}, Reason.GRADIENT_CARRIED, ""),
    ],
)
def test_a_step_that_needs_all_gradients_first_is_declined_with_the_reason(
    step: dict[str, Any], reason: Reason, detail: str
) -> None:
    rewrite = recipes.apply(sample(), ALONE, workload=Workload(batches=[BATCH], **step))
    assert not rewrite.changed
    declined = rewrite.passes[0].declined
    assert [(each.node, each.reason, each.detail) for each in declined] == [
        ("remote_call", reason, detail),
        ("remote_call_1", reason, detail),
    ]
    assert detail in str(declined[0])


def test_a_plain_step_is_not_declined() -> None:
    assert recipes.apply(sample(), ALONE, workload=Workload(batches=[BATCH])).passes[0].changes == 2


def test_a_result_whose_gradient_a_hook_may_change_is_only_tracked() -> None:
    rewrite = recipes.apply(sample(hook=True), ALONE)
    assert operators(rewrite.module) == [track_gradient, send_gradient]
    assert [(each.node, each.reason) for each in rewrite.passes[0].declined] == [
        ("remote_call", Reason.GRADIENT_HOOKED)
    ]


def test_a_result_that_is_also_used_as_it_came_is_only_tracked() -> None:
    """Autograd counts the writes to both as one: else a write through one would go unseen by the other's backward."""
    rewrite = recipes.apply(sample(shared=True), ALONE)
    assert operators(rewrite.module) == [send_gradient, track_gradient]
    assert [(each.node, each.reason, each.detail) for each in rewrite.passes[0].declined] == [
        ("remote_call_1", Reason.RESULT_SHARED, "neg")
    ]


def test_it_travels() -> None:
    module = recipes.apply(sample(), ALONE).module
    decoded = wire.decode(wire.parse(wire.serialize(wire.encode(module).graph)))
    assert operators(decoded) == [send_gradient, send_gradient]


def test_the_rewritten_module_says_which_gradients_it_sends() -> None:
    assert "send_gradient" in fxlib.optimize(sample(), ALONE).code
