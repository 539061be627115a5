"""A launcher that asks for inference: weights go up only for passes that need them, computed values come down."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fxlib
from fxlib import Client, Workload, wire
from fxlib.analysis.effects.gradients import respects_no_grad
from fxlib.client.request import Question, captured_of
from fxlib.errors import FxlibWarning, WorkloadError
from fxlib.protocol import RecipeLike
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.spec.workload import Mode
from fxlib.utils.compare import relative_error
from tests.client.models import Clicks, workload
from tests.client.scripted import Scripted
from tests.recipes.rotated import Rotated

pytestmark = pytest.mark.slow


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).eval()


@pytest.fixture
def on_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxlib.client.session.instructions", lambda: ("avx2",))


FORWARDS = Workload.describe([torch.randn(8, 4)], mode="forward")


def rewrite(service: Scripted, model: nn.Module, recipe: str = "inference", *, error: float = 1e-7) -> None:
    """Have the service answer with what a recipe makes of the model."""
    captured = fxlib.capture(model)
    answer = wire.encode(fxlib.optimize(captured, recipe), beside=captured)
    service.blobs |= answer.blobs
    service.adopt(wire.serialize(answer.graph))
    service.job.result.preserves = "tolerance"
    service.job.result.max_relative_error = error


def sent(service: Scripted) -> int:
    """How many different values came with the graph that was asked about."""
    return len(wire.values_of(wire.parse(service.blobs[service.requests[-1].graph.sha256])))


def test_weights_are_sent_for_a_pass_that_needs_them_and_for_no_other(service: Scripted, client: Client) -> None:
    client.optimize(fxlib.capture(Clicks()), workload(), progress=False)
    assert sent(service) == 0
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    asked: list[tuple[RecipeLike, int]] = [
        ("inference", 5),
        (["dead_code"], 0),
        (["dead_code", ("fold_norms", {})], 5),
    ]
    for recipe, count in asked:
        client.optimize(model, FORWARDS, recipe=recipe, progress=False)
        assert sent(service) == count


def test_auto_sends_what_the_launcher_can_compile_with_and_weights_only_for_forwards_that_may_have_them(
    service: Scripted, client: Client
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    trained = Workload.describe([torch.randn(8, 4)], loss="mean")
    asked: list[tuple[Workload, bool, int]] = [(FORWARDS, True, 5), (FORWARDS, False, 0), (trained, True, 0)]
    for steps, weights, count in asked:
        client.optimize(model, steps, recipe="auto", weights=weights, progress=False)
        assert sent(service) == count
        assert f"inductor=={importlib.metadata.version('torch')}" in service.requests[-1].backends
    with pytest.raises(WorkloadError, match="fold_norms needs the weights"):
        client.optimize(model, FORWARDS, recipe="inference", weights=False, progress=False)
    client.optimize(model, FORWARDS, recipe="schedule", progress=False)
    assert not service.requests[-1].backends


@pytest.mark.parametrize(
    "recipe, mode, without",
    [
        ("inference", "forward", True),
        ("auto", "forward", True),
        ("schedule", "forward", False),
        ("auto", "local", False),
    ],
)
def test_forwards_alone_are_captured_as_they_run_where_passes_could_change_nothing_else(
    recipe: str, mode: Mode, without: bool
) -> None:
    model, x = Rotated().eval(), torch.randn(8, 4)
    steps = Workload.describe([x], mode=mode, loss="mean")
    graph = captured_of(model, steps, Question(recipe=recipe))
    assert respects_no_grad(graph) is without
    for grad in (False, True):
        with torch.set_grad_enabled(grad), warnings.catch_warnings(action="ignore"):
            assert torch.equal(graph(x), model(x))
    assert sum(fxlib.usage(graph).original.values()) == 1
    assert captured_of(graph, steps, Question(recipe=recipe)) is graph


def test_computed_values_come_back_with_the_error(service: Scripted, client: Client, model: nn.Module) -> None:
    rewrite(service, model)
    result = client.optimize(model, FORWARDS, recipe="inference", progress=False)
    assert result.decision == "adopt"
    assert (result.preserves, result.max_relative_error) == ("tolerance", 1e-7)
    assert "preserves: tolerance, not bitwise; largest relative error measured: 1e-07" in str(result)
    assert "training, and whatever records gradients, goes on with the original" in str(result)
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert relative_error(result.module(x), model(x)) < 1e-6
    assert result.module.state_dict().keys() == model.state_dict().keys()


def test_an_answer_about_weights_that_have_changed_runs_the_model(
    service: Scripted, client: Client, model: nn.Sequential
) -> None:
    rewrite(service, model)
    handle = client.submit(model, FORWARDS, recipe="inference")
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)
        module, x = handle.result(30).module, torch.randn(2, 4)
        with pytest.warns(FxlibWarning, match="have changed: optimize the model again"):
            assert torch.equal(module(x), model(x))


@pytest.mark.parametrize("error", [None, 2e-4])
def test_an_answer_beyond_the_bound_is_not_taken(
    service: Scripted, client: Client, model: nn.Module, error: float | None
) -> None:
    rewrite(service, model)
    service.job.result.ClearField("max_relative_error")
    if error is not None:
        service.job.result.max_relative_error = error
    with pytest.warns(FxlibWarning, match=r"adopts without a relative error of at most 0\.0001"):
        assert client.optimize(model, FORWARDS, recipe="inference", progress=False).decision == "keep_original"


@pytest.mark.usefixtures("on_avx2")
@pytest.mark.parametrize(
    "measured, why",
    [
        ((["avx2"], ""), ""),
        ((["avx2", "avx512_vnni"], ""), r"its processor is another one \(avx512_vnni there alone\)"),
        ((["amx_bf16"], ""), r"another one \(amx_bf16 there alone, avx2 here alone\)"),
        ((["avx2"], "inductor==0.1"), "it compiled with inductor==0.1, and this one has inductor=="),
        ((["avx2"], "inductor"), ""),
    ],
)
def test_an_answer_is_taken_on_a_machine_of_the_kind_on_which_it_was_measured(
    service: Scripted, client: Client, model: nn.Module, measured: tuple[Sequence[str], str], why: str
) -> None:
    there, backend = measured
    rewrite(service, model)
    service.job.result.instructions.extend(there)
    if backend:
        version = backend if "==" in backend else f"{backend}=={importlib.metadata.version('torch')}"
        service.job.result.parts.add(first="relu", nodes=3, backend=version, compiled=True)
    with pytest.warns(FxlibWarning, match=why) if why else nullcontext():
        result = client.optimize(model, FORWARDS, recipe="inference", progress=False)
    assert (result.decision, result.reason) == (
        ("keep_original", Reason.OTHER_MACHINE) if why else ("adopt", Reason.FASTER)
    )
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert not why or torch.equal(result.module(x), model(x))


def test_a_bound_of_one_s_own_is_part_of_the_question(service: Scripted, client: Client, model: nn.Module) -> None:
    rewrite(service, model, error=2e-4)
    result = client.optimize(model, FORWARDS, recipe="inference", max_relative_error=1e-3, progress=False)
    assert service.requests[-1].trial.max_relative_error == 1e-3
    assert result.decision == "adopt"


def test_steps_that_train_what_a_pass_computes_with_are_a_mistake(client: Client, model: nn.Module) -> None:
    training = Workload.describe([torch.randn(8, 4)])
    with pytest.raises(WorkloadError, match=r"Workload\.mode: the pass fold_norms .* mode=\"forward\""):
        client.optimize(model, training, recipe="inference", progress=False)


def test_weights_without_values_keep_the_original(client: Client) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with pytest.warns(FxlibWarning, match="a tensor on the meta device has no values"):
        result = client.optimize(model, FORWARDS, recipe="inference", progress=False)
    assert result.decision == "keep_original"


def quantizable() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()


BATCHES = [torch.rand(16, 64) * 3.0 for _ in range(3)]


def answered_in_int8(service: Scripted, model: nn.Module, *, scale: float = 1.0) -> None:
    """Have the service answer with the int8 form of the model, for the launcher's batches times a number."""
    captured = fxlib.capture(model)
    steps = Workload(batches=[scale * each for each in BATCHES], mode="forward", optimizer="none")
    rewrite = recipes.get("int8").run(captured, recipes.PlanningRequest(workload=steps))
    answer = wire.encode(rewrite.module, beside=captured)
    service.blobs |= answer.blobs
    service.adopt(wire.serialize(answer.graph))
    service.job.result.preserves = "lossy"
    service.job.result.max_relative_error = 0.01


def test_of_described_batches_ranges_alone_are_sent(service: Scripted, client: Client) -> None:
    model, steps = quantizable(), Workload.describe(BATCHES, mode="forward", optimizer="none")
    answered_in_int8(service, model)
    result = client.optimize(model, steps, recipe="int8", max_relative_error=0.05, progress=False)
    request = service.requests[-1].workload
    layers = [list(each.weights) for each in request.ranges if each.weights]  # the others are of values in between
    assert layers == [["0.bias", "0.weight"], ["2.bias", "2.weight"]]
    assert request.ranges[0].most == pytest.approx(max(float(each.max()) for each in BATCHES))
    assert not request.HasField("batches")
    assert 2.9 < request.description.inputs[0].high <= 3.0
    assert sent(service) == 4  # weights, and no values of batches
    assert result.decision == "adopt"


def test_what_misses_the_bound_on_batches_that_were_not_sent_is_not_taken(service: Scripted, client: Client) -> None:
    model, steps = quantizable(), Workload.describe(BATCHES, mode="forward", optimizer="none")
    answered_in_int8(service, model, scale=0.1)  # the real inputs are cut off
    result = client.optimize(model, steps, recipe="int8", max_relative_error=0.05, progress=False)
    assert (result.decision, result.reason) == ("keep_original", Reason.NOT_SAME)
    assert "on the job's own batches it has a relative error of" in str(result)
    with torch.no_grad():
        assert torch.equal(result.module(BATCHES[0]), model(BATCHES[0]))


def test_training_and_other_recipes_keep_no_batches_and_send_no_ranges(service: Scripted, client: Client) -> None:
    assert Workload.describe(BATCHES, loss="mean").calibration == ()
    model, steps = quantizable(), Workload.describe(BATCHES, mode="forward", optimizer="none")
    client.optimize(model, steps, recipe="inference", progress=False)
    assert not service.requests[-1].workload.ranges
