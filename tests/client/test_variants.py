"""Each variant of a workload is part of one question, and comes back with a decision and a graph of its own."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import Client, Server, Table, Variant, Workload, ps, wire
from fxlib.capture.capture_variant import capture_variant, mode_of
from fxlib.client.request import Question, prepare
from fxlib.client.variant_exchange import profile_of
from fxlib.errors import CaptureError, FxlibWarning, WorkloadError
from fxlib.runtime import CapturedModule, is_call, is_issue
from fxlib.spec.profile import CallProfile, Profile, Spread, TensorShape
from fxlib.v1 import graph_pb2, jobs_pb2
from tests.client.scripted import Scripted

X, IDS, MASK = torch.randn(4, 8), torch.randint(100, (4,)), torch.ones(4, 8)


class Clicks(nn.Module):
    """Two lookups, and a third while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        found = [rpc.rpc_sync("ps0", ps.lookup, args=(name, ids)) for name in ("a", "b")]
        if self.training:
            found.append(rpc.rpc_sync("ps0", ps.lookup, args=("c", ids)))
        x = self.dropout(self.bottom(x)) + sum(found)
        return x if mask is None else x * mask


def workload(**more: object) -> Workload:
    servers = [Server(name="ps0", tables=[Table(name=name, rows=100, dim=8) for name in "abc"])]
    asked: dict[str, object] = {"evaluation": True, **more}
    return Workload(batches=[(X, IDS, MASK)], servers=servers, **asked)  # type: ignore[arg-type]


def bare() -> Variant:
    return Variant(name="no mask", batches=[(X, IDS)])


def adopts(service: Scripted, name: str, module: nn.Module | None) -> None:
    """Have the scripted service adopt a graph for a variant, or keep the original."""
    told = service.job.result.variants.add(name=name)
    told.result.decision, told.result.preserves = jobs_pb2.DECISION_KEEP_ORIGINAL, "bitwise"
    if module is None:
        return
    assert isinstance(module, CapturedModule)
    graph = wire.encode(module).graph.SerializeToString(deterministic=True)
    address = graph_pb2.BlobRef(sha256=hashlib.sha256(graph).hexdigest(), size=len(graph))
    service.blobs[address.sha256] = graph
    told.result.decision = jobs_pb2.DECISION_ADOPT
    told.result.reason_code, told.result.reason = "FASTER", "faster"
    told.result.gain.CopyFrom(jobs_pb2.Estimate(value=2.0, low=1.9, high=2.1))
    told.result.graph.CopyFrom(address)


def variant_of(module: nn.Module, name: str) -> CapturedModule:
    assert isinstance(module, CapturedModule)
    return dict(module._fxlib.graphs)[name]


def calls_of(module: CapturedModule) -> list[object]:
    return [node.args[2][0] for node in module.graph.nodes if is_call(node)]


def test_evaluation_is_short_for_eval_mode_without_gradients() -> None:
    (variant,) = workload().variants
    assert variant == Variant(name="evaluation", training=False, grad=False)
    own = workload().of(variant)
    assert (own.mode, own.trainer_optimizer.name, own.variants) == ("forward", "none", ())
    assert own.real_batches == workload().real_batches


@pytest.mark.parametrize(
    "made",
    [
        lambda: Variant(name="main"),
        lambda: Variant(name=""),
        lambda: Variant(name="x", targets=[X]),
        lambda: Variant(name="x", batches=[]),
        lambda: workload(variants=[Variant(name="evaluation")]),
        lambda: workload(variants=[Variant(name=str(index)) for index in range(7)]),
        lambda: workload(mode="forward", variants=[bare()]),
    ],
)
def test_variants_that_make_no_sense_are_refused_where_they_are_made(made: object) -> None:
    with pytest.raises(WorkloadError):
        made()  # type: ignore[operator]


def test_a_description_describes_the_batches_of_variants_too() -> None:
    described = Workload.describe([(X, IDS, MASK)], variants=[bare()], ranges={"input.1": (0, 1000)})
    (variant,) = described.variants
    assert isinstance(variant.batches, fxlib.BatchSpec)
    assert variant.batches.named["input.1"].high == 1000
    assert not variant.real_batches


def test_a_variant_is_captured_in_its_mode_and_the_model_stays_in_its_own() -> None:
    model = Clicks()
    model.dropout.eval()
    main = fxlib.capture(model)
    variant = capture_variant(main, workload().variants[0], workload())
    assert calls_of(main) == ["a", "b", "c"]
    assert calls_of(variant) == ["a", "b"]
    assert (main.training, model.training, model.dropout.training, torch.is_grad_enabled()) == (True, True, False, True)


def test_the_options_of_the_main_capture_hold_for_variants() -> None:
    main = fxlib.capture(Clicks(), leaf_modules=["bottom"], concrete_args={"mask": None})
    variant = capture_variant(main, Variant(name="x"), Workload(batches=[(X, IDS)]))
    assert variant._fxlib.conditions.fixed == {"mask": None}


def test_a_model_that_sets_its_own_flags_keeps_its_original_in_that_mode() -> None:
    class Frozen(Clicks):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.dropout.eval()
            return self

    main = fxlib.capture(Frozen())
    with pytest.raises(CaptureError, match=r"Frozen overrides train\(\)"), mode_of(main, workload().variants[0]):
        pass
    with pytest.warns(FxlibWarning, match="'evaluation'"):
        prepared = prepare(main, workload(), Question())
    assert not prepared.request.variants
    assert "overrides" in prepared.declined["evaluation"].explanation


def test_variants_travel_in_one_request_with_graphs_and_workloads_of_their_own() -> None:
    prepared = prepare(fxlib.capture(Clicks()), workload(variants=[bare()]), Question())
    evaluation, masked = prepared.request.variants
    assert [each.name for each in prepared.request.variants] == ["evaluation", "no mask"]
    assert len({prepared.request.graph.sha256, evaluation.graph.sha256, masked.graph.sha256}) == 3
    assert prepared.blobs.keys() >= {evaluation.graph.sha256, masked.graph.sha256}
    decoded = wire.decode(wire.parse(prepared.blobs[evaluation.graph.sha256]))
    assert not decoded.training
    assert not decoded.get_submodule("dropout").training


def test_adopted_variants_run_in_the_module_of_the_answer_whatever_becomes_of_the_main_graph(
    service: Scripted, client: Client
) -> None:
    model = Clicks()
    captured = fxlib.capture(model)
    rewritten = fxlib.optimize(captured, workload=workload())
    adopts(service, "evaluation", variant_of(rewritten, "evaluation"))
    result = client.optimize(captured, workload(), progress=False)
    assert (result.decision, result.variants["evaluation"].decision) == ("keep_original", "adopt")
    assert result.adopted
    assert result.module is not captured
    variant = variant_of(result.module, "evaluation")
    assert any(map(is_issue, variant.graph.nodes))
    assert variant.get_parameter("bottom.weight") is model.bottom.weight
    assert not list(captured._fxlib.graphs)
    assert "evaluation" in str(result)
    assert "+200.0%" in str(result)


@pytest.mark.slow
def test_a_variant_with_gradients_that_is_not_adopted_runs_its_captured_graph_which_tracks_them(
    service: Scripted, client: Client
) -> None:
    captured = fxlib.capture(Clicks())
    rewritten = fxlib.optimize(captured, workload=workload())
    adopts(service, "evaluation", variant_of(rewritten, "evaluation"))
    adopts(service, "no mask", None)
    result = client.optimize(captured, workload(variants=[bare()]), progress=False)
    assert not any(map(is_issue, variant_of(result.module, "no mask").graph.nodes))
    assert variant_of(result.module, "no mask")._fxlib.tape is result.module._fxlib.tape  # type: ignore[union-attr]


def test_a_graph_that_calls_what_the_variant_does_not_call_is_refused(service: Scripted, client: Client) -> None:
    captured = fxlib.capture(Clicks())
    adopts(service, "evaluation", captured)  # the main graph, which asks for another table
    service.job.result.variants[0].result.graph.CopyFrom(_stored(service, fxlib.capture(Other())))
    with pytest.warns(FxlibWarning, match="the original does not"):
        result = client.optimize(captured, workload(), progress=False)
    assert result.module is captured


class Other(Clicks):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return rpc.rpc_sync("ps9", ps.lookup, args=("a", ids)) + x


def _stored(service: Scripted, module: CapturedModule) -> graph_pb2.BlobRef:
    graph = wire.encode(module).graph.SerializeToString(deterministic=True)
    address = graph_pb2.BlobRef(sha256=hashlib.sha256(graph).hexdigest(), size=len(graph))
    service.blobs[address.sha256] = graph
    return address


def test_a_service_that_knows_of_no_variants_answers_about_the_main_graph_alone(
    service: Scripted, client: Client
) -> None:
    result = client.optimize(fxlib.capture(Clicks()), workload(), progress=False)
    assert result.variants["evaluation"].decision == "keep_original"
    assert "knows nothing" in result.variants["evaluation"].explanation


def test_a_call_of_a_variant_goes_by_the_record_of_the_same_function() -> None:
    captured = fxlib.capture(Clicks())
    names = [node.name for node in captured.graph.nodes if is_call(node)]
    record = CallProfile(
        call=names[0],
        function="fxlib.ps:lookup",
        to="ps0",
        request_bytes=1,
        response_bytes=1,
        returns=TensorShape(shape=(4, 8), dtype=torch.float32),
        issue_s=0.0,
        wait_s=0.0,
        service_s=Spread(quantiles=(0.01,)),
    )
    profile = Profile(calls=(record,), backward_s=1.0, step_s=2.0)
    found = profile_of(profile, captured, forward=True)
    assert [each.call for each in found.calls] == names
    assert (found.backward_s, found.step_s) == (0.0, 0.0)


class Reducing(Clicks):
    """Adds its result up over all ranks, and where `twice`, without a mask, once more."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.twice = twice

    def forward(self, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x, ids, mask)
        for _ in range(2 if self.twice and mask is None else 1):
            x = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "0"))
        return x


@pytest.mark.slow
def test_training_variants_make_the_collectives_of_the_models_own_step_or_are_declined() -> None:
    described = workload(variants=[bare()], trainers=2)
    prepared = prepare(fxlib.capture(Reducing(twice=False)), described, Question())
    assert {each.name for each in prepared.request.variants} == {"no mask", "evaluation"}
    with pytest.warns(FxlibWarning, match="collectives"):
        prepared = prepare(fxlib.capture(Reducing(twice=True)), described, Question())
    assert [each.name for each in prepared.request.variants] == ["evaluation"]
    assert "other collectives than the model's own step" in prepared.declined["no mask"].explanation
