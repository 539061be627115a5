"""A pass is held to what it declares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from typing_extensions import override

import fxlib
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.model import Effects
from fxlib.errors import PassError
from fxlib.passes import REGISTRY, Context, GraphPass, PassResult, SplitCalls, register_pass
from fxlib.reasons import Declined, Reason
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.spec.profile import Profile
from tests.analysis.sketch import Sketch, names


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    with mock.patch.dict(REGISTRY):
        yield


def sample() -> CapturedModule:
    root = nn.Module()
    root.layer = nn.Linear(2, 2)
    program = Sketch("x", root=root)
    (x,) = program.inputs
    noise = program.work("noise", torch.rand_like, x)
    more = program.work("more", torch.rand_like, x)
    return program.returns(program.call("found", program.module("dense", "layer", noise)), more)


def erase(module: GraphModule, name: str) -> PassResult:
    node = next(node for node in module.graph.nodes if node.name == name)
    node.replace_all_uses_with(node.all_input_nodes[0])
    module.graph.erase_node(node)
    return PassResult(module, changes=1)


def test_a_bitwise_pass_may_not_lose_a_call() -> None:
    @register_pass("loses", preserves="bitwise")
    class Loses(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            node = next(node for node in module.graph.nodes if node.name == "found")
            node.replace_all_uses_with(next(iter(module.graph.nodes)))
            module.graph.erase_node(node)
            return PassResult(module, changes=1)

    with pytest.raises(PassError, match="loses: a bitwise pass lost or added calls: found"):
        recipes.apply(sample(), recipes.from_passes([("loses", {})]))


def test_a_bitwise_pass_may_not_lose_a_random_operator_and_another_may() -> None:
    for preserves in ("bitwise", "tolerance"):

        @register_pass(f"quiet {preserves}", preserves=preserves)
        class Quiet(GraphPass):
            @override
            def run(self, module: GraphModule, context: Context) -> PassResult:
                return erase(module, "noise")

    with pytest.raises(PassError, match="random"):
        recipes.apply(sample(), recipes.from_passes([("quiet bitwise", {})]))
    assert recipes.apply(sample(), recipes.from_passes([("quiet tolerance", {})])).preserves == "tolerance"


def test_a_pass_may_not_lose_a_wait() -> None:
    @register_pass("forgets", preserves="lossy")
    class Forgets(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            SplitCalls()(module)
            wait = next(node for node in module.graph.nodes if node.name == "found")
            wait.replace_all_uses_with(next(iter(module.graph.nodes)))
            module.graph.erase_node(wait)
            return PassResult(module, changes=1)

    with pytest.raises(PassError, match="calls are left without a wait: found"):
        recipes.apply(sample(), recipes.from_passes([("forgets", {})]))


def test_a_pass_may_not_change_weights_that_it_did_not_ask_for() -> None:
    @register_pass("drifts", preserves="lossy")
    class Drifts(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            module.layer = nn.Linear(2, 2)
            return PassResult(module, changes=1)

    module = sample()
    with pytest.raises(PassError, match="without declaring that it needs weights"):
        recipes.apply(module, recipes.from_passes([("drifts", {})]))


class Nested(nn.Module):
    """A module with a part at the root and one within another."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.inner = nn.ReLU(), nn.Sequential(nn.Linear(2, 2))

    @override
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(self.act(x))
        return found


REPLACED: dict[str, tuple[Callable[[GraphModule], object], str]] = {
    "a part of a part": (lambda module: module.set_submodule("inner.0", nn.Identity()), "inner.0"),
    "a part of a part, deleted": (lambda module: module.delete_submodule("inner.0"), "inner.0"),
    "a part added to a part": (
        lambda module: module.get_submodule("inner").add_module("more", nn.ReLU()),
        "inner.more",
    ),
    "a parameter of a part": (
        lambda module: setattr(module.get_submodule("inner.0"), "weight", nn.Parameter(torch.zeros(2, 2))),
        "inner.0.weight",
    ),
}


@pytest.mark.parametrize("fails", [False, True], ids=["and returns", "and raises"])
@pytest.mark.parametrize("case", REPLACED)
def test_what_a_pass_replaces_within_a_part_stays_the_callers(case: str, fails: bool) -> None:
    change, path = REPLACED[case]

    @register_pass("replaces", preserves="lossy", needs=frozenset({"weights"}))
    class Replaces(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            change(module)
            if fails:
                raise PassError("fails after that")
            return PassResult(module, changes=1)

    model = Nested()
    parts, state = dict(model.named_modules()), dict(model.named_parameters())
    with pytest.raises(
        PassError, match="fails after that" if fails else rf"replaces: the pass replaced or removed '{path}'"
    ):
        recipes.apply(fxlib.capture(model), recipes.from_passes([("replaces", {})]))
    assert dict(model.named_modules()) == parts
    assert all(now is state[name] for name, now in model.named_parameters())


def test_a_part_that_a_pass_replaces_at_the_root_is_the_rewrites_alone() -> None:
    @register_pass("smooth", preserves="lossy")
    class Smooth(GraphPass):
        changes: int = 1

        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            module.act = nn.GELU()
            return PassResult(module, changes=self.changes)

    model, x = Nested(), torch.tensor([-1.0, 1.0])
    rewrite = recipes.apply(fxlib.capture(model), recipes.from_passes([("smooth", {})]))
    assert rewrite.changed
    assert torch.equal(rewrite.module(x), model.inner(nn.functional.gelu(x)))
    assert torch.equal(model(x), model.inner(x.relu()))
    with pytest.raises(PassError, match="smooth: the pass reports no changes"):
        recipes.apply(fxlib.capture(model), recipes.from_passes([("smooth", {"changes": 0})]))


def _without_output(module: GraphModule) -> PassResult:
    module.graph.erase_node(next(reversed(module.graph.nodes)))
    return PassResult(module, changes=1)


RUNS: dict[str, tuple[Callable[[GraphModule], Any], str]] = {
    "returns nothing": (lambda module: None, "runs: run returned None"),
    "takes the output away": (_without_output, "runs: the pass left the graph without an output"),
    "copies its module": (copy.deepcopy, "is a copy already"),
    "calls its module": (lambda module: module(torch.ones(2)), "has no code yet"),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_pass_that_does_what_it_cannot_is_told(case: str) -> None:
    run, words = RUNS[case]
    with pytest.raises(PassError, match=words):
        runs_as(run)


def runs_as(run: Callable[[GraphModule], Any]) -> recipes.Rewrite:
    @register_pass("runs", preserves="lossy")
    class Runs(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            found: PassResult = run(module)
            return found

    return recipes.apply(fxlib.capture(Nested()), recipes.from_passes([("runs", {})]))


def test_a_pass_may_let_torch_drop_what_is_not_used() -> None:
    assert not runs_as(lambda module: PassResult(module, changes=int(module.graph.eliminate_dead_code()))).changed


def test_an_exception_says_which_pass_was_running() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        runs_as(lambda module: 1 // 0)
    assert raised.value.__notes__ == ["The pass 'runs' was running."]


@pytest.mark.parametrize(
    "declared",
    [{"preserves": "lossyy"}, {"preserves": "lossy", "needs": {"eval"}}, {"preserves": "lossy", "needs": "eval_mode"}],
)
def test_a_declaration_that_means_nothing_is_refused(declared: dict[str, Any]) -> None:
    with pytest.raises(PassError, match=r"SplitCalls: (preserves|needs) is .*lossy|eval_mode"):
        register_pass("misdeclared", **declared)(SplitCalls)


def test_a_pass_may_not_keep_its_changes_to_itself() -> None:
    @register_pass("shy", preserves="lossy")
    class Shy(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            erase(module, "more")
            return PassResult(module, changes=0)

    with pytest.raises(PassError, match="reports no changes, but changed the graph"):
        recipes.apply(sample(), recipes.from_passes([("shy", {})]))


def test_ensures_looks_at_the_output() -> None:
    @register_pass("promises", preserves="tolerance")
    class Promises(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            return erase(module, "noise")

        @override
        def ensures(self, module: GraphModule) -> None:
            assert "noise" not in names(module)

    recipes.apply(sample(), recipes.from_passes([("promises", {})]))


def test_a_pass_for_eval_mode_refuses_a_module_in_training() -> None:
    @register_pass("folds", preserves="tolerance", needs=frozenset({"eval_mode"}))
    class Folds(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            return PassResult(module, changes=0)

    with pytest.raises(PassError, match="folds: needs a module in eval mode"):
        recipes.apply(sample(), recipes.from_passes([("folds", {})]))


def test_options_are_frozen_keywords_and_part_of_the_recipes_key() -> None:
    @register_pass("tuned", preserves="bitwise", version="3")
    class Tuned(GraphPass):
        depth: int = 2

        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            declined = Declined(node="found", reason=Reason.NOTHING_TO_OVERLAP)
            return PassResult(module, changes=0, declined=(declined,))

    recipe = recipes.from_passes([("tuned", {"depth": 5})])
    assert recipe.key == "tuned@3 depth=5"
    with pytest.raises(FrozenInstanceError):
        recipe.passes[0].depth = 1  # type: ignore[attr-defined]
    (report,) = recipes.apply(sample(), recipe).passes
    assert (report.name, report.changes, len(report.declined)) == ("tuned", 0, 1)
    assert report.seconds >= 0
    with pytest.raises(PassError, match="has no option 'width'"):
        recipes.from_passes([("tuned", {"width": 1})])


def test_an_analysis_is_made_once_and_anew_when_the_graph_has_changed() -> None:
    module = sample()
    context = Context(module)
    first = context.get(Dependencies)
    assert context.get(Dependencies) is first
    assert context.get(Effects) is first.effects
    SplitCalls()(module, context)
    assert context.get(Dependencies) is not first
    assert context.get(Effects).nodes == list(module.graph.nodes)


def test_an_analysis_is_made_anew_after_a_pass_that_changed_a_module_alone() -> None:
    @register_pass("changes no node", preserves="lossy")
    class Swaps(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            context.get(Dependencies)
            return PassResult(module, changes=1)

    module = sample()
    context = Context(module)
    first = context.get(Dependencies)
    Swaps()(module, context)
    assert context.get(Dependencies) is not first


def test_a_pass_reads_profile_and_workload_from_its_context_and_nothing_is_left_in_the_module() -> None:
    seen = []

    @register_pass("reads its context", preserves="bitwise")
    class Reads(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            seen.append((context.profile, context.workload, set(module.meta) & {"profile", "workload"}))
            return PassResult(module, changes=0)

    profile = Profile(steps=3)
    recipes.apply(sample(), recipes.from_passes([("reads its context", {})]), profile=profile)
    assert seen == [(profile, None, set())]


def test_a_pass_that_takes_a_module_alone_runs_for_one_more_release() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old\.run takes only a module; write run\(self, module, context\)"):

        @register_pass("old", preserves="bitwise")
        class Old(GraphPass):
            @override
            def run(self, module: GraphModule) -> PassResult:  # type: ignore[override]
                return PassResult(module, changes=0)

    assert recipes.apply(sample(), recipes.from_passes([("old", {})])).passes[0].changes == 0


def test_two_passes_may_not_share_a_name() -> None:
    with pytest.raises(PassError, match="another pass is called 'dead_code'"):
        register_pass("dead_code", preserves="bitwise")(SplitCalls)


def test_a_pass_tells_what_it_did_and_what_it_left_by_the_logger_of_its_own_module(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @register_pass("picky", preserves="bitwise")
    class Picky(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            return PassResult(module, changes=0, declined=(Declined(node="dense", reason=Reason.MODE_BLOCK),))

    caplog.set_level("DEBUG", logger=__name__)
    recipes.apply(sample(), recipes.from_passes([("picky", {})]))
    did, left = (each.getMessage() for each in caplog.records)
    assert did.startswith("picky: 0 changes, 1 declined, ")
    assert left == f"picky left dense alone: {Reason.MODE_BLOCK.sentence()}"


def test_a_recipe_tells_what_became_of_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="fxlib")
    recipes.apply(sample(), "schedule")
    assert caplog.messages[-1] == "recipe schedule changed a graph of 1 calls"
    assert SplitCalls.__module__ in {each.name for each in caplog.records}


def test_passes_are_quiet_unless_they_are_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fxlib")
    recipes.apply(sample(), "schedule")
    assert caplog.records == []
