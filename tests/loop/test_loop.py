"""The whole loop: a real service, real workers, a real Ray, and a launcher that wants its module back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.client import Client
from fxlib.client.result import Result
from fxlib.reasons import Reason
from fxlib.spec.workload import Server, Workload
from fxlib.utils.compare import relative_error
from tests.loop.processes import Service, Worker, submit, until
from tests.shared.collector import Collector, attributes
from tests.workers import remote_code
from tests.workers.cases import Lookups, Reducing, lookup_workload
from tests.workers.convnet import ConvNet, images
from tests.workers.trial_settings import MEASURED

pytestmark = pytest.mark.cluster


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", self.function, args=(x,))
        return first + rpc.rpc_sync("ps0", self.function, args=(x,))


def hanging() -> tuple[nn.Module, Workload]:
    workload = Workload.describe([torch.randn(2, 2)], servers=[Server(name="ps0")], mode="forward")
    return Calls(remote_code.hang), workload


@dataclass(frozen=True)
class Answered:
    """A job of a launcher, and its answer."""

    model: nn.Module
    workload: Workload
    result: Result


@pytest.fixture(scope="module")
def answered(service: Service, workers: list[Worker]) -> Answered:
    model, workload = Lookups(), lookup_workload()
    with fxlib.connect(service.address) as client:
        return Answered(model, workload, client.optimize(model, workload, name="demo"))


def test_a_launcher_gets_its_own_module_back_faster_and_proven(answered: Answered) -> None:
    result = answered.result
    assert result.decision == "adopt", result.explanation
    assert result.gain is not None
    assert result.gain.low > 0.02
    assert dict(result.module.named_parameters())["bottom.weight"] is answered.model.get_parameter("bottom.weight")
    assert result.hardware
    assert {"fetch", "rewrite", "start", "sameness", "qps"} <= result.phase_seconds.keys()


def test_a_job_is_one_trace_from_its_launcher_to_the_phases_of_its_trial(
    answered: Answered, collector: Collector, folder: Path
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    handed_in = "client.optimize/client.send/service.OptimizerService/Optimize"
    job, trial = f"{handed_in}/worker.run_job", f"{handed_in}/worker.run_job/worker.trial"
    wanted = {"client.optimize/client.capture", "client.optimize/client.wait", "client.optimize/client.bind"}
    wanted |= {f"{handed_in}/service.queued", f"{job}/worker.fetch", f"{job}/worker.rewrite", f"{job}/worker.hand_in"}
    wanted |= {f"{trial}/worker.trial.{phase}" for phase in ("sameness", "qps")}

    def paths() -> dict[str, str]:
        trace = collector.trace_of(answered.result.job_id)
        spans = {span.span_id: (process, span) for process, span in trace}

        def path(span: Any) -> str:
            return span.name if not span.parent_span_id else f"{path(spans[span.parent_span_id][1])}/{span.name}"

        known = [each for each in trace if all(one.parent_span_id in {b"", *spans} for _, one in trace)]
        return {path(span): process for process, span in known}

    collector.until(lambda: wanted <= paths().keys())
    assert {paths()[each] for each in (handed_in, job)} == {"fxlib-service", "fxlib-worker"}
    told = [attributes(span) for _, span in collector.spans if span.name in ("client.optimize", "worker.run_job")]
    for each in (each for each in told if each.get("fxlib.job_id") == answered.result.job_id):
        assert (each["fxlib.model"], each["fxlib.recipe"], each["fxlib.decision"]) == ("demo", "schedule", "adopt")
        assert answered.result.gain is not None
        assert each["fxlib.gain"] == answered.result.gain.value
    trace_id = collector.trace_of(answered.result.job_id)[0][1].trace_id.hex()
    assert f"trace_id={trace_id}" in (folder / "first.log").read_text()


def test_a_relaunch_is_answered_at_once(client: Client, answered: Answered) -> None:
    again = client.optimize(Lookups(), answered.workload)
    assert (answered.result.cached, again.cached) == (False, True)
    assert (again.reason, again.gain) == (answered.result.reason, answered.result.gain)
    assert client.job(again.job_id).attempts == 0


def test_a_job_whose_ranks_meet_in_collectives_is_measured_on_as_many_ranks(client: Client) -> None:
    workload = lookup_workload(tables=2, service_time_s=0.01, trainers=2, mode="forward")
    result = client.optimize(Reducing(), workload, budget_s=30)
    assert result.reason is Reason.FASTER, result.explanation
    assert result.not_reproduced == ()
    assert {"profile", "sameness", "qps"} <= result.phase_seconds.keys()
    assert {call.function for call in result.calls} == {"all_reduce", "fxlib.ps:lookup"}


def test_a_convolutional_net_comes_back_for_inference_with_the_error_that_was_measured(client: Client) -> None:
    model, x = ConvNet(), torch.randn(4, 3, 32, 32)
    result = client.optimize(model, images(batch=8), recipe="inference", budget_s=20)
    assert result.reason in MEASURED, result.explanation
    assert result.preserves == "tolerance"
    assert result.max_relative_error is not None
    assert 0.0 < result.max_relative_error < 1e-5
    assert "largest relative error measured" in str(result)
    assert {each.name: each.changes for each in result.passes}["fold_norms"] == 5
    with torch.no_grad():
        assert relative_error(result.module(x), model(x)) < 1e-5
    assert dict(result.module.named_parameters())["head.weight"] is model.head.weight


def test_a_perceptron_comes_back_on_int8_weights_within_the_bound(client: Client) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU()))).eval()
    batches = [torch.randn(64, 512) for _ in range(3)]
    steps = Workload(batches=batches, mode="forward", optimizer="none")
    result = client.optimize(model, steps, recipe="int8", max_relative_error=0.1, budget_s=20)
    assert result.reason in MEASURED, result.explanation
    assert result.preserves == "lossy"
    assert {each.name: each.changes for each in result.passes}["quantize"] == 4
    assert result.max_relative_error is not None
    assert 1e-5 < result.max_relative_error < 0.1
    if result.decision == "adopt":
        with torch.no_grad():
            assert 1e-5 < relative_error(result.module(batches[0]), model(batches[0])) < 0.1
    strict = client.optimize(model, steps, recipe="int8", budget_s=8)  # within the usual bound, one in ten thousand
    left = next(each for each in strict.passes if each.name == "quantize")
    assert [each.reason for each in left.declined] == [Reason.ERROR_BOUND] * 4
    assert strict.decision == "keep_original"


def test_of_all_that_may_make_a_net_faster_the_best_comes_back_with_what_was_tried(client: Client) -> None:
    batches = [torch.randn(8, 3, 32, 32) for _ in range(3)]
    model, steps = ConvNet().eval(), Workload(batches=batches, mode="forward", optimizer="none")
    result = client.optimize(model, steps, recipe="auto", budget_s=20)
    assert result.reason in MEASURED, result.explanation
    rows = {each.name: each for each in result.candidates}
    assert rows.keys() >= {"int8", "lower to inductor", "inference"}
    assert "for rounding alone" in rows["int8"].verdict
    assert all(each.verdict for each in rows.values())
    assert any(each.gain for each in rows.values()) or result.reason is Reason.BUDGET_EXHAUSTED
    assert str(result).count("lower to ") >= 2
    with torch.no_grad():
        assert relative_error(result.module(batches[0]), model(batches[0])) < 1e-4


def test_a_worker_goes_on_after_a_model_that_hangs_and_after_a_job_that_is_cancelled(client: Client) -> None:
    job = client.watch(submit(client, *hanging(), step_timeout_s=1.0), lambda _: None, timeout_s=90)
    assert job.report is not None
    assert job.report.reason is Reason.TRIAL_HUNG
    job_id = submit(client, *hanging(), step_timeout_s=300.0)
    until(client, job_id, "running")
    assert client.cancel(job_id).state == "cancelled"
    # The step of the job that was cancelled may take longer than this test.
    assert client.optimize(Lookups(), lookup_workload(), fresh=True, budget_s=20).reason in MEASURED


def test_a_job_survives_the_service_and_a_client_that_leaves(client: Client, service: Service) -> None:
    with fxlib.connect(service.address) as leaver:
        job_id = submit(leaver, Lookups(), lookup_workload(service_time_s=0.004))
        until(leaver, job_id, "sameness")
    service.kill()
    time.sleep(1.0)
    service.start()
    job = client.watch(job_id, lambda _: None, timeout_s=90)
    assert (job.state, job.attempts) == ("succeeded", 1)
    assert job.report is not None
    assert job.report.reason in MEASURED


def test_a_job_outlives_its_workers_and_they_leave_nothing(
    client: Client, service: Service, workers: list[Worker], folder: Path
) -> None:
    def end(worker: Worker, how: Callable[[Worker], None]) -> None:
        made = worker.folder()
        how(worker)
        assert worker.left() == []
        assert not made.exists()

    job_id = submit(client, Lookups(), lookup_workload(service_time_s=0.003))
    until(client, job_id, "sameness")
    told = workers.pop()
    end(told, Worker.end)
    assert "given back" in told.log.read_text()
    workers.append(Worker(service, folder, "second"))
    until(client, job_id, "qps", deadline_s=120)
    assert client.job(job_id).worker_id == "second"
    end(workers.pop(), Worker.kill)
    workers.append(Worker(service, folder, "third"))
    job = client.watch(job_id, lambda _: None, timeout_s=120)
    assert (job.state, job.attempts, job.worker_id) == ("succeeded", 2, "third")


def test_a_launcher_with_stale_reads_learns_what_they_are_worth_and_how_stale_they_were(client: Client) -> None:
    workload = lookup_workload(tables=4, service_time_s=0.01, pipeline=1, stale=1)
    result = client.optimize(Lookups(tables=4), workload, budget_s=30, max_relative_error=1.0)
    assert result.reason is Reason.FASTER, result.explanation
    rows = {each.name.partition(", ")[2]: each for each in result.candidates}
    assert set(rows) == {"pipeline", "pipeline off", "pipeline, stale by 1"}
    assert rows["pipeline, stale by 1"].gain is not None or result.stale
    if result.stale:
        assert (result.pipeline, result.preserves) == (1, "lossy")
        assert result.staleness[1] > 0
        assert set(result.staleness) <= {0, 1}
        assert result.max_relative_error


def test_a_launcher_with_a_pipeline_learns_what_it_is_worth(client: Client) -> None:
    workload = lookup_workload(tables=4, service_time_s=0.01, pipeline=1)
    result = client.optimize(Lookups(tables=4), workload, budget_s=30)
    assert result.reason is Reason.FASTER, result.explanation
    assert {each.name.partition(", ")[2] for each in result.candidates} == {"pipeline", "pipeline off"}
    assert {each.ahead for each in result.calls} == {Reason.RUNS_BY_KEYS}
    chosen = max((each for each in result.candidates if each.gain), key=lambda each: each.verdict.startswith("chosen"))
    assert (result.pipeline == 1) is not chosen.name.endswith("off")
