"""The candidates that a rewrite hands to a trial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import GraphModule

import fxlib
from fxlib import ps, wire
from fxlib.errors import PassError
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime.backends import installed
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, Profile, ServerProfile, Spread
from fxlib.spec.report import Report
from fxlib.spec.workload import Workload
from fxlib_workers.exchange import JobFolder
from fxlib_workers.rewrite.answer_worker import rewrite
from fxlib_workers.rewrite.make_candidates import make_candidates
from tests.capture.servers import double
from tests.workers.cases import DIM, Lookups, lookup_workload, request
from tests.workers.convnet import ConvNet, images

SERVERS = tuple(
    ServerProfile(name=f"ps{rank}", round_trip_s=4e-4, concurrency=16, bytes_per_s=1e9, per_item_s=1e-5)
    for rank in range(2)
)
PROFILE = Profile(servers=SERVERS, steps=1)


@pytest.fixture
def lookups() -> GraphModule:
    return fxlib.capture(Lookups())


def test_no_two_drafts_are_the_same_program(lookups: GraphModule) -> None:
    made = make_candidates(lookups, recipes.get("schedule"), lookup_workload(), None).ranked
    assert len(made) > 1
    assert len({each.graph for each in made}) == len(made)
    assert len({each.name for each in made}) == len(made)


def test_under_a_launchers_pipeline_each_program_is_tried_with_it_and_without(lookups: GraphModule) -> None:
    workload = lookup_workload(pipeline=2)
    made = make_candidates(lookups, recipes.get("schedule"), workload, None).ranked
    names = [(each.name, each.report.pipeline) for each in made]
    assert names[:2] == [("schedule, pipeline", 2), ("schedule, pipeline off", 0)]
    assert made[0].graph == made[1].graph
    assert {call.ahead for each in made for call in each.report.calls} == {Reason.RUNS_BY_KEYS}


def test_a_loop_with_stale_reads_is_tried_if_the_request_allows_more_than_rounding(lookups: GraphModule) -> None:
    workload = lookup_workload(pipeline=2, stale=1)
    for profile in (None, PROFILE):
        made = make_candidates(lookups, recipes.get("schedule"), workload, profile, max_relative_error=0.1).ranked
        found = {each.name: (each.report.pipeline, each.report.stale, each.report.preserves) for each in made}
        assert found["schedule, pipeline, stale by 1"] == (2, 1, "lossy")
        assert found["schedule, pipeline"] == (2, 0, "bitwise")
        assert found["schedule, pipeline off"] == (0, 0, "bitwise")
        stale = next(each for each in made if each.report.stale)
        assert "reads may miss the pushes of 1 step: lossy" in str(stale.report) or profile is None
        assert profile is None or made[0] is stale  # it waits for no push
    made = make_candidates(lookups, recipes.get("schedule"), workload, None, max_relative_error=1e-4).ranked
    assert not any(each.report.stale for each in made)
    (row,) = (each for each in made[0].report.candidates if "stale" in each.name)
    assert row.verdict == "not tried: it is lossy, and max_relative_error is 0.0001, which is for rounding alone"


def test_of_reads_that_no_push_writes_none_is_stale(lookups: GraphModule) -> None:
    workload = replace(lookup_workload(), mode="forward", optimizer="none", pipeline=2, stale=1)
    made = make_candidates(lookups, recipes.get("schedule"), workload, None, max_relative_error=0.1).ranked
    assert not any(each.report.stale for each in made)


def test_what_is_expected_of_a_loop_is_a_step_of_it_and_not_one_by_itself(lookups: GraphModule) -> None:
    batches = [(torch.randn(16, 13), torch.arange(64).reshape(16, 4) + 64 * place) for place in range(2)]
    workload = Workload(batches=batches, pipeline=1, mode="forward")
    made = make_candidates(lookups, recipes.get("schedule"), workload, PROFILE).ranked
    expected = {each.name: each.row.predicted_step_s or 0.0 for each in made}
    assert 0.0 < expected["schedule, pipeline"] < expected["schedule, pipeline off"]
    for each in made:
        assert 0.0 < (each.report.pipeline_bound_s or 0.0) <= expected["schedule, pipeline"]
        assert "the least under a pipeline, by the cost model, for" in str(each.report)


def test_a_model_none_of_whose_calls_may_run_ahead_is_not_tried_under_a_pipeline() -> None:
    class Chained(nn.Module):
        def forward(self, keys: torch.Tensor) -> torch.Tensor:
            first = rpc.rpc_sync("ps0", double, args=(keys,))
            return rpc.rpc_sync("ps0", double, args=(first,))

    workload = fxlib.Workload.describe([torch.randn(4)], pipeline=1, mode="forward")
    made = make_candidates(fxlib.capture(Chained()), recipes.get("schedule"), workload, None)
    assert {each.report.pipeline for each in made.ranked} <= {0}
    assert Reason.UNKNOWN_CONTRACT in {call.ahead for call in made.recipe.calls}


def test_each_draft_says_what_its_own_passes_did(lookups: GraphModule) -> None:
    for each in make_candidates(lookups, recipes.get("schedule"), lookup_workload(), None).ranked:
        ran = {step.name for step in each.report.passes}
        assert ("coalesce_calls" in ran) == ("without coalesce_calls" not in each.name)
        assert [call.node for call in each.report.calls] == ["lookup", "lookup_1", "lookup_2", "lookup_3"]
        assert wire.decode(wire.parse(each.graph), root=lookups).graph.nodes


def test_each_draft_shows_what_its_own_passes_did_to_the_code_where_that_is_wanted(lookups: GraphModule) -> None:
    for each in make_candidates(lookups, recipes.get("schedule"), lookup_workload(), None, diffs=True).ranked:
        shown = {step.name: step.diff for step in each.report.passes}
        assert "+    lookup_issue = " in shown["split_calls"]
        assert ("coalesce_calls" in shown) == ("without coalesce_calls" not in each.name)
    for each in make_candidates(lookups, recipes.get("schedule"), lookup_workload(), None).ranked:
        assert {step.diff for step in each.report.passes} == {""}


def test_diffs_that_a_request_asks_for_are_in_the_answer(tmp_path: Path) -> None:
    folder = request(tmp_path / "job", Lookups(), lookup_workload())
    asked = folder.request()
    asked.diffs = True
    (folder.path / "request.pb").write_bytes(asked.SerializeToString())
    rewrite(folder)
    assert all(bool(step.diff) for step in folder.read_rewrite().passes if step.changes)


def test_without_a_profile_the_recipe_comes_first_and_nothing_is_predicted(lookups: GraphModule) -> None:
    made = make_candidates(lookups, recipes.get("schedule"), lookup_workload(), None).ranked
    assert made[0].name == "schedule"
    assert all(each.row.predicted_step_s is None and each.report.bound_s is None for each in made)


def test_with_a_profile_drafts_are_in_order_of_their_prediction(lookups: GraphModule) -> None:
    made = make_candidates(lookups, recipes.get("schedule"), lookup_workload(), PROFILE).ranked
    predicted = [each.row.predicted_step_s or 0.0 for each in made]
    assert predicted == sorted(predicted)
    assert predicted[0] > 0.0


def test_with_a_profile_no_draft_is_expected_to_beat_the_bound(lookups: GraphModule) -> None:
    made = make_candidates(lookups, recipes.get("schedule"), lookup_workload(), PROFILE).ranked
    bounds = {each.report.bound_s for each in made}
    assert len(bounds) == 1
    (limit_s,) = bounds
    assert limit_s is not None
    assert 0.0 < limit_s <= (made[0].row.predicted_step_s or 0.0)
    assert all(each.report.timeline_bound for each in made)


def undeclared(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("ps0", double, args=(x,)) + rpc.rpc_sync("ps0", double, args=(x,))


def test_what_is_kept_says_what_a_missing_declaration_is_worth(tmp_path: Path) -> None:
    folder = request(tmp_path / "job", fxlib.capture(undeclared), lookup_workload())
    rewrite(folder)
    report = folder.read_rewrite()
    assert report.reason is Reason.NOTHING_CHANGED
    assert report.undeclared[0].functions == ("tests.capture.servers:double",)
    assert report.explanation.endswith(f"; {report.undeclared[0]}")


def test_a_list_of_passes_makes_one_draft(lookups: GraphModule) -> None:
    custom = recipes.from_passes([("split_calls", {}), ("overlap_calls", {})])
    assert [each.name for each in make_candidates(lookups, custom, lookup_workload(), None).ranked] == ["custom"]


def test_a_graph_that_does_not_change_has_no_drafts() -> None:
    found = make_candidates(fxlib.capture(nn.Linear(2, 2)), recipes.get("schedule"), lookup_workload(), None)
    assert found.ranked == ()
    assert [step.changes for step in found.recipe.passes] == [0] * len(found.recipe.passes)


def test_the_folder_gives_drafts_back_in_order_with_the_first_as_chosen(tmp_path: Path) -> None:
    folder = request(tmp_path / "job", Lookups(), lookup_workload())
    rewrite(folder)
    made = folder.candidates()
    assert made[0].name == "schedule"
    assert folder.rewritten.read_bytes() == made[0].graph
    assert folder.read_rewrite().calls == made[0].report.calls
    folder.choose(made[1])
    assert folder.rewritten.read_bytes() == made[1].graph


def test_a_second_rewrite_plans_by_the_profile_that_was_left(tmp_path: Path) -> None:
    folder = request(tmp_path / "job", Lookups(), lookup_workload())
    rewrite(folder)
    folder.write_profile(PROFILE)
    rewrite(folder)
    assert all(each.row.predicted_step_s for each in folder.candidates())


def test_drafts_stay_where_a_later_rewrite_finds_nothing_to_change(tmp_path: Path) -> None:
    folder = request(tmp_path / "job", nn.Linear(2, 2), lookup_workload())
    earlier = make_candidates(fxlib.capture(Lookups()), recipes.get("schedule"), lookup_workload(), None).ranked
    folder.write_rewrite(earlier[0].report, earlier)
    rewrite(folder)
    assert [each.name for each in folder.candidates()] == [each.name for each in earlier]


class Chained(nn.Module):
    """A lookup by the result of another: there is next to no work beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(DIM, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", ps.lookup, args=("t0", sparse[:, 0]))
        then = rpc.rpc_sync("ps1", ps.lookup, args=("t1", first.argmax(1)))
        return self.top(then) + dense.relu().sum()


def timed(*, relu_s: float) -> Profile:
    """Two calls of 10 ms, and work beside them."""
    calls = tuple(
        CallProfile(
            call=call,
            function="fxlib.ps:lookup",
            to=to,
            request_bytes=0,
            response_bytes=0,
            returns=Opaque(),
            issue_s=1e-4,
            wait_s=1e-5,
            service_s=Spread.of([1e-2]),
        )
        for call, to in (("lookup", "ps0"), ("lookup_1", "ps1"))
    )
    names = [node.name for node in fxlib.capture(Chained()).graph.nodes if node.op in {"call_function", "call_method"}]
    work = {name: relu_s if name == "relu" else 1e-6 for name in names if not name.startswith("lookup")}
    nodes = tuple(NodeProfile(node=name, seconds=seconds, output_bytes=0) for name, seconds in work.items())
    return Profile(servers=SERVERS, calls=calls, nodes=nodes, steps=5)


@pytest.mark.parametrize("relu_s, reason", [(2e-5, Reason.NOTHING_TO_GAIN), (1e-2, None)])
def test_a_program_of_which_no_order_gains_enough_is_left_alone_before_a_trial(
    tmp_path: Path, relu_s: float, reason: Reason | None
) -> None:
    folder = request(tmp_path / "job", Chained(), lookup_workload())
    folder.write_profile(timed(relu_s=relu_s))
    rewrite(folder)
    report = folder.read_rewrite()
    assert report.reason is reason
    assert bool(folder.candidates()) is (reason is None)
    if reason is not None:
        assert report.explanation.endswith("0.1%")


def test_a_program_that_gains_across_the_step_alone_is_tried_under_its_pipeline(tmp_path: Path) -> None:
    folder = request(tmp_path / "job", Chained(), lookup_workload(pipeline=1))
    folder.write_profile(timed(relu_s=2e-5))
    rewrite(folder)
    assert folder.read_rewrite().reason is None
    assert {each.report.pipeline for each in folder.candidates()} == {0, 1}


def test_a_folder_without_drafts_has_none(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.write_rewrite(Report(decision="keep_original", reason=None, explanation=""))
    assert folder.candidates() == ()


@pytest.mark.slow
def test_a_draft_brings_the_values_that_the_original_has_not_and_no_other() -> None:
    original = fxlib.capture(ConvNet())
    found = make_candidates(original, recipes.get("inference"), images(), None).ranked
    assert [each.name for each in found] == ["inference", "inference without channels_last"]
    for each in found:
        message = wire.parse(each.graph)
        assert {ref.sha256 for ref in wire.values_of(message)} == each.values.keys()
        own = {name for name, value in wire.decode(message, blobs=each.values, root=original).named_buffers()}
        folded = own - dict(original.named_buffers()).keys()
        assert len(folded) == len(each.values) == 10


@pytest.mark.slow
def test_the_folder_gives_drafts_back_with_their_values(tmp_path: Path) -> None:
    folder = request(tmp_path / "job", ConvNet(), images(), recipe="inference", weights=True)
    rewrite(folder)
    first, second = folder.candidates()
    assert folder.values_in(folder.rewritten.read_bytes()) == first.values
    assert first.values.keys() <= folder.blobs().keys()
    assert second.values


def test_nothing_is_computed_from_weights_that_were_not_sent(tmp_path: Path) -> None:
    folder = request(tmp_path / "job", ConvNet(), images(), recipe="inference")
    with pytest.raises(PassError, match=r"fold_norms: needs the weights, .* without the values of 'stem.0.weight'"):
        rewrite(folder)
    assert folder.candidates() == ()


def auto(model: nn.Module, workload: Workload, **options: Any) -> tuple[list[str], dict[str, str]]:
    """Return the names of what `auto` would have a trial measure, and why there is nothing else, by name."""
    backends = [installed("inductor_freezing"), "openvino==0.1"]
    made = make_candidates(fxlib.capture(model), recipes.get("auto"), workload, None, backends=backends, **options)
    rows = made.ranked[0].report.candidates[1:] if made.ranked else made.recipe.candidates
    return [each.name for each in made.ranked], {each.name: each.verdict for each in rows}


@pytest.mark.slow
def test_auto_makes_what_the_request_allows_and_says_what_it_does_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxlib_workers.rewrite.make_candidates.instructions", lambda: ("amx_bf16", "avx2"))
    with torch.no_grad():
        tried, untried = auto(ConvNet(), images(), max_relative_error=0.05)
    assert sorted(tried) == [
        "bfloat16", "inference", "inference without channels_last", "int8", "int8 without channels_last",
        "lower to inductor_freezing",
    ]  # fmt: skip
    assert "the launcher has openvino==0.1, and this worker " in untried["lower to openvino"]
    assert "it changes nothing" in untried.get("auto", "it changes nothing")
    with torch.no_grad():
        tried, untried = auto(ConvNet(), images(), max_relative_error=1e-4)
    assert "int8" not in tried
    assert "for rounding alone" in untried["int8"]
    assert "for rounding alone" in untried["bfloat16"]
    monkeypatch.setattr("fxlib_workers.rewrite.make_candidates.instructions", lambda: ("avx2",))
    with torch.no_grad():
        tried, untried = auto(ConvNet(), images(), max_relative_error=0.05)
    assert "bfloat16" not in tried
    assert "no instructions for bfloat16" in untried["bfloat16"]


class Wide(nn.Module):
    """Layers whose products take nearly all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "has, first",
    [(("avx512_vnni", "avx512_bf16"), "int8"), (("avx512_bf16",), "int8"), (("amx_bf16", "amx_int8"), "int8")],
)
def test_auto_tries_the_candidate_first_that_a_roofline_expects_to_be_fastest(
    monkeypatch: pytest.MonkeyPatch, has: tuple[str, ...], first: str
) -> None:
    for module in ("make_candidates", "predicted_time"):
        monkeypatch.setattr(f"fxlib_workers.rewrite.{module}.instructions", lambda: has)
    steps = Workload(batches=[torch.randn(256, 512)], mode="forward", optimizer="none")
    backends = [installed("inductor_freezing")]
    with torch.no_grad():
        made = make_candidates(
            fxlib.capture(Wide().eval()),
            recipes.get("auto"),
            steps,
            None,
            backends=backends,
            max_relative_error=0.05,
        )
    predicted = [each.row.predicted_step_s for each in made.ranked]
    assert [each.name for each in made.ranked] == [first, "bfloat16", "lower to inductor_freezing"]
    assert None not in predicted
    assert predicted == sorted(predicted)  # type: ignore[type-var]
    assert made.ranked[0].report.candidates[0].predicted_step_s == predicted[0]


@pytest.mark.slow
def test_auto_computes_nothing_from_weights_that_are_trained_or_were_not_sent() -> None:
    steps = Workload.describe([torch.randn(4, 64)], loss="mean")
    tried, untried = auto(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), steps)
    assert tried == []
    assert "which a training step changes" in untried["inference"]
    assert "eval mode" in untried["lower to inductor_freezing"]

    def check(recipe: recipes.Recipe) -> None:
        if any("weights" in step.needs for step in recipe.passes):
            raise PassError("needs the weights, and the graph was sent without them")

    with torch.no_grad():
        tried, untried = auto(ConvNet(), images(), check=check)
    assert tried == ["lower to inductor_freezing"]
    assert "sent without them" in untried["inference"]
