"""What trackers of experiments take of a result; with those that are installed, what they then have."""

import json
import string
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from fxlib.client.result import Result
from fxlib.integrations.trackers import live_metrics_of, metrics_of, params_of
from fxlib.spec.report import Estimate, LiveFigures
from tests.client.test_rendering import REPORT

LIVE = LiveFigures(qps_optimized=140.0, gain=Estimate(value=0.4, low=0.3, high=float("inf")), steps=1000)
EVIL = '<b>\u202e\x1b[31m\nred: "a/b"' + "x" * 10_000


def result() -> Result:
    return Result.of(REPORT, module=nn.Identity(), job_id="17", cached=True)


def test_numbers_have_names_and_what_was_not_measured_has_none() -> None:
    told = metrics_of(result())
    assert told["fxlib/adopted"] == 1.0
    assert (told["fxlib/gain"], told["fxlib/gain_low"], told["fxlib/gain_high"]) == (0.9, 0.85, 0.951)
    assert (told["fxlib/qps_optimized"], told["fxlib/step_s_optimized"]) == (2345.6, 0.007)
    assert (told["fxlib/calls_moved"], told["fxlib/calls_left_alone"]) == (1.0, 1.0)
    assert (told["fxlib/exposed_before_s"], told["fxlib/phase/qps_s"]) == (0.0123, 12.5)
    assert "fxlib/max_relative_error" not in told
    nothing = Result.original(nn.Identity(), "the service is away")
    assert metrics_of(nothing) == {"fxlib/adopted": 0.0}
    assert params_of(nothing)["fxlib/explanation"] == "the service is away"


def test_live_figures_are_finite_numbers() -> None:
    assert live_metrics_of(LIVE) == {
        "fxlib/live/qps_optimized": 140.0,
        "fxlib/live/gain": 0.4,
        "fxlib/live/gain_low": 0.3,
        "fxlib/live/went_back": 0.0,
    }


def test_names_and_values_are_such_as_trackers_take() -> None:
    hostile = replace(
        result(), explanation=EVIL, hardware=EVIL, phase_seconds={EVIL[:60]: 1.0}, variants={EVIL[:60]: REPORT}
    )
    known = set(string.ascii_letters + string.digits + "/._- ")  # MLflow's, which has the fewest
    assert [name for name in metrics_of(hostile) if not set(name) <= known or len(name) > 250] == []
    assert any(name.startswith("fxlib/variant/_b___") and name.endswith("/gain") for name in metrics_of(hostile))
    assert [value for value in params_of(hostile).values() if not value.isprintable() or len(value) > 500] == []


def test_mlflow_has_metrics_parameters_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install 'fxlib[mlflow]'")
    from fxlib.integrations.mlflow import log_live, log_result

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        log_result(result())
        log_live(LIVE)
    kept = mlflow.get_run(run.info.run_id).data
    assert kept.params == params_of(result())
    assert kept.metrics == metrics_of(result()) | live_metrics_of(LIVE)
    (point,) = mlflow.MlflowClient().get_metric_history(run.info.run_id, "fxlib/live/gain")
    assert point.step == 1000
    page = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/fxlib/report.html")
    assert "<svg" in page
    told = json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/fxlib/result.json"))
    assert told == json.loads(json.dumps(result().to_dict()))


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for name, value in metrics_of(result()).items():
            writer.add_scalar(name, value)
    found = EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) == set(metrics_of(result()))
    assert found.Scalars("fxlib/gain")[0].value == pytest.approx(0.9)
