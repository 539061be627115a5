"""Recipes work on a copy, and say what they did."""

from __future__ import annotations

import gc
import warnings
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import fxlib
from fxlib.errors import PassError
from fxlib.passes import REGISTRY, Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import differs, working_copy
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.spec.workload import Workload
from tests.analysis.sketch import READ, Sketch, names
from tests.recipes.rotated import Rotated


def sample() -> CapturedModule:
    root = nn.Module()
    root.layer = nn.Linear(2, 2)
    program = Sketch("x", "ids", root=root)
    x, ids = program.inputs
    dense = program.module("dense", "layer", x)
    return program.returns(dense, program.call("found", ids))


def test_the_given_module_stays_as_it_is() -> None:
    module = sample()
    code, metas = module.code, [dict(node.meta) for node in module.graph.nodes]
    rewrite = recipes.apply(module, assume="reads")
    assert rewrite.changed
    assert module.code == code
    assert [dict(node.meta) for node in module.graph.nodes] == metas
    assert module.graph.owning_module is module


def test_a_recipe_is_run_by_its_run_whatever_asks_for_it() -> None:
    request = recipes.PlanningRequest(assume="reads")
    run, applied = recipes.get("schedule").run(sample(), request), recipes.apply(sample(), assume="reads")
    optimized = fxlib.optimize(sample(), assume="reads")
    assert run.module.code == applied.module.code == optimized.code != sample().code
    assert run.calls == applied.calls != ()


def test_a_job_is_planned_with_what_its_workload_states() -> None:
    workload = Workload(batches=[(torch.zeros(1, 2), torch.zeros(1))], contracts={"shop:call": READ}, assume="reads")
    request = recipes.PlanningRequest.of(workload)
    assert (request.contracts, request.assume, request.workload) == ({"shop:call": READ}, "reads", workload)


def test_the_rewritten_module_shares_parameters_under_the_same_names() -> None:
    module = sample()
    rewritten = recipes.apply(module).module
    assert isinstance(rewritten, CapturedModule)
    assert rewritten.layer.weight is module.layer.weight
    assert list(rewritten.state_dict()) == list(module.state_dict())
    rewritten.graph.lint()


def test_a_call_that_moved_keeps_its_name_and_its_place_in_the_program() -> None:
    nodes = {node.name: node for node in recipes.apply(sample()).module.graph.nodes}
    assert nodes["found"].meta["order"] == nodes["found_issue"].meta["order"]
    assert nodes["found"].meta["call"] == nodes["found_issue"].meta["call"] == "found"
    assert nodes["found"].meta["order"] > nodes["dense"].meta["order"]


def test_a_rewrite_of_a_rewrite_changes_nothing() -> None:
    first = recipes.apply(sample()).module
    second = recipes.apply(first)
    assert not second.changed
    assert second.module is first


def test_a_graph_without_calls_comes_back_as_it_is() -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    rewrite = recipes.apply(module)
    assert rewrite.module is module
    assert rewrite.calls == ()
    assert [report.name for report in rewrite.passes] == [each.name for each in recipes.get("schedule").passes]


def test_a_change_of_keyword_arguments_or_of_state_alone_is_a_change() -> None:
    given = symbolic_trace(nn.Linear(2, 2))
    assert not differs(given, working_copy(given))
    reworded, reweighed = working_copy(given), working_copy(given)
    next(node for node in reworded.graph.nodes if node.op == "call_function").kwargs = {"bias": None}
    reweighed._parameters["weight"] = nn.Parameter(torch.ones(2, 2))
    assert differs(given, reworded)
    assert differs(given, reweighed)


def test_optimize_hands_the_module_over_with_its_rewrite() -> None:
    module = fxlib.optimize(sample())
    assert names(module) == ["found_issue", "dense", "found"]
    assert module.meta["rewrite"].module is module


@pytest.mark.parametrize("mode, folds", [("forward", True), (None, False)])
def test_forwards_alone_are_captured_as_they_run_if_passes_use_weights(
    mode: Literal["forward"] | None, folds: bool
) -> None:
    model, x = Rotated().eval(), torch.randn(8, 4)
    workload = None if mode is None else Workload.describe([x], mode=mode)
    rewritten = fxlib.optimize(model, "inference", workload=workload)
    assert rewritten.meta["rewrite"].changed is folds
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        torch.testing.assert_close(rewritten(x), model(x))
    assert torch.equal(rewritten(x), model(x))
    assert fxlib.optimize(captured := fxlib.capture(model), "inference", workload=workload) is captured


def test_a_model_that_cannot_be_captured_without_gradients_stays_as_it_was_captured() -> None:
    class Otherwise(Rotated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled() and x.sum() > 0:
                return x
            return super().forward(x)

    model, x = Otherwise().eval(), torch.randn(8, 4)
    rewritten = fxlib.optimize(model, "inference", workload=Workload.describe([x], mode="forward"))
    assert not rewritten.meta["rewrite"].changed
    assert torch.equal(rewritten(x), model(x))


def test_structured_inputs_and_outputs_survive() -> None:
    class Structured(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            unused = torch.sin(batch["x"])  # noqa: F841 - dead code is what changes here
            return {"y": batch["x"].cos()}

    module = symbolic_trace(Structured(), concrete_args={"batch": {"x": torch.fx.PH}})
    rewrite = recipes.apply(module)
    assert rewrite.changed
    batch = {"x": torch.ones(2)}
    assert torch.equal(rewrite.module(batch)["y"], module(batch)["y"])


def test_unknown_names_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(PassError, match="no recipe is called 'fast'"):
        recipes.get("fast")
    with pytest.raises(PassError, match="no pass is called 'fuse'"):
        recipes.from_passes([("fuse", {})])


def test_a_failing_recipe_leaves_the_garbage_collector_on() -> None:
    with pytest.raises(PassError):
        recipes.apply(sample(), "fast")
    assert gc.isenabled()


@pytest.mark.parametrize(
    "passes", [None, "dead_code", ["dead_code"], [("dead_code", None)], [("dead_code",)], [(1, {})]]
)
def test_what_is_no_list_of_passes_is_refused(passes: Any) -> None:
    with pytest.raises(PassError, match=r"is no list of passes with their options\. Give pairs"):
        recipes.from_passes(passes)


@pytest.mark.parametrize(
    "name,option,value",
    [
        ("fold_constants", "max_bytes", -1),
        ("coalesce_calls", "max_calls", 0),
        ("coalesce_calls", "batch_bytes", -5),
        ("coalesce_writes", "max_calls", 0),
        ("quantize", "least_weights", -1),
        ("bfloat16", "least_weights", -1),
    ],
)
def test_a_limit_that_nothing_could_meet_is_refused(name: str, option: str, value: int) -> None:
    with pytest.raises(PassError, match=rf"{name}: {option} is {value}; it must be an integer of at least"):
        recipes.from_passes([(name, {option: value})])


@pytest.mark.parametrize("written", [int, "int", int | None, "int | None"], ids=str)
def test_the_type_of_an_option_counts_however_it_is_written(written: Any) -> None:
    def run(self: GraphPass, module: GraphModule, context: Context) -> PassResult:
        return PassResult(module, changes=self.least)  # type: ignore[attr-defined]

    body = {"__annotations__": {"least": written}, "least": 0, "run": run}
    with mock.patch.dict(REGISTRY):
        register_pass("counted", preserves="bitwise")(type("Counted", (GraphPass,), body))
        recipes.from_passes([("counted", {"least": 1})])
        for value in (1.5, "many", True):
            with pytest.raises(PassError, match=r"counted: the option 'least' is of type int.*is not"):
                recipes.from_passes([("counted", {"least": value})])
