"""Bad calibration and bad compilers, through the whole loop: the launcher has its original, and the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxlib
from fxlib.client import Client
from fxlib.client.result import Result
from fxlib.reasons import Reason
from fxlib.runtime.backends import BACKENDS
from fxlib.spec.job import TrialOptions
from fxlib.spec.workload import Workload
from tests.loop.processes import Service, Worker

pytestmark = pytest.mark.cluster
BAD_BACKENDS = "tests.workers.bad_backends"
NAMES = ("openvino", "onnxruntime", "inductor", "inductor_freezing", "absent")


class Compiler:
    """What a launcher knows of a compiler: its name and its version, which is torch's."""

    package, keeps_weights = "torch", True

    def __init__(self, name: str) -> None:
        self.name = name

    def compile(self, part: nn.Module, _: object) -> Callable[..., object]:
        """Compile nothing."""
        return part


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service with one worker, whose compilers are those of `bad_backends`."""
    folder: Path = tmp_path_factory.mktemp("bad")
    service = Service(folder)
    worker = Worker(service, folder, "bad", modules=[BAD_BACKENDS])
    yield service.address
    worker.end()
    service.end()


@pytest.fixture
def launcher(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr("fxlib.client.request.TrialOptions", partial(TrialOptions, step_timeout_s=2.0))
    for name in NAMES:
        monkeypatch.setitem(BACKENDS, name, Compiler(name))
    with fxlib.connect(address) as made:
        yield made


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).eval()


def steps(*batches: Tensor) -> Workload:
    return Workload(batches=[*batches], mode="forward", optimizer="none")


def assert_original(result: Result, model: nn.Module, x: Tensor) -> None:
    assert result.decision == "keep_original", result.explanation
    assert result.explanation
    with torch.no_grad():
        assert torch.equal(result.module(x), model(x))


CALIBRATIONS: dict[str, tuple[Tensor, Reason]] = {
    "NaN": (torch.full((8, 128), math.nan), Reason.CALIBRATION_NOT_FINITE),
    "infinity": (torch.full((8, 128), math.inf), Reason.CALIBRATION_NOT_FINITE),
    "no rows": (torch.zeros(0, 128), Reason.CALIBRATION_TOO_SMALL),
}


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_batches_on_which_nothing_can_be_calibrated_leave_the_original(launcher: Client, name: str) -> None:
    batch, reason = CALIBRATIONS[name]
    model = perceptron()
    result = launcher.optimize(model, steps(batch), recipe=[("quantize", {})], max_relative_error=0.1, budget_s=8)
    (quantize,) = result.passes
    assert {each.reason for each in quantize.declined} == {reason}
    assert result.reason is Reason.NO_CALLS
    assert_original(result, model, torch.randn(8, 128))


def test_a_bound_of_zero_leaves_the_original(launcher: Client) -> None:
    model, x = perceptron(), torch.randn(8, 128)
    result = launcher.optimize(model, steps(x), recipe=[("quantize", {})], max_relative_error=0.0, budget_s=8)
    (quantize,) = result.passes
    assert [each.reason for each in quantize.declined] == [Reason.ERROR_BOUND] * 2
    assert [each.lossy for each in quantize.sensitivity] == [False] * 2
    assert_original(result, model, x)


class Chosen(nn.Module):
    """Work whose results have sizes that depend on values, which no compiler is given."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.masked_select(x, torch.nonzero(x).sum() > 0)


def test_a_model_that_no_compiler_takes_leaves_the_original(launcher: Client) -> None:
    model, x = Chosen().eval(), torch.randn(8, 128)
    result = launcher.optimize(model, steps(x), recipe=[("lower", {"backend": "inductor_freezing"})], budget_s=8)
    assert result.reason is Reason.NO_CALLS
    assert_original(result, model, x)


class Sines(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x.sin()
        return x


COMPILERS = {
    "openvino": (Reason.TRIAL_DIED, "Segmentation fault (signal 11)"),
    "onnxruntime": (Reason.TRIAL_HUNG, "time_parts"),
    "inductor": (Reason.NO_PART_FASTER, "returned a result of another form than (8, 128)"),
}


@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_that_crashes_hangs_or_returns_other_shapes_leaves_the_original(launcher: Client, name: str) -> None:
    reason, why = COMPILERS[name]
    model, x = Sines().eval(), torch.randn(8, 128)
    lower = [("lower", {"backend": name})]
    result = launcher.optimize(model, steps(x), recipe=lower, budget_s=8)
    assert result.reason is reason
    assert why in result.explanation
    assert_original(result, model, x)


def test_auto_says_of_a_compiler_that_the_worker_has_not_or_in_another_version_that_it_was_not_tried(
    launcher: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKENDS["inductor_freezing"], "package", "pip")
    model, x = Sines().eval(), torch.randn(8, 128)
    result = launcher.optimize(model, steps(x), recipe="auto", budget_s=15)
    rows = {each.name: each.verdict for each in result.candidates}
    assert "not tried: the launcher has inductor_freezing==" in rows["lower to inductor_freezing"]
    assert "and this worker inductor_freezing==" in rows["lower to inductor_freezing"]
    assert "and this worker none" in rows["lower to absent"]
    assert_original(result, model, x)
