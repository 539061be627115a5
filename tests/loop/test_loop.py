"""The whole loop: a real service, real workers, a real Ray, and a launcher that wants its module back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.client import Client
from fxlib.reasons import Reason
from fxlib.workload import Server, Workload
from tests.loop.processes import Service, Worker, submit, until
from tests.workers import remote_code
from tests.workers.cases import Lookups, lookup_workload

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loop")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    made = Service(folder)
    yield made
    made.end()


@pytest.fixture(scope="module")
def workers(service: Service, folder: Path) -> Iterator[list[Worker]]:
    """The workers at hand: one, unless a test has replaced it."""
    made = [Worker(service, folder, "first")]
    yield made
    for worker in made:
        worker.end()
    assert [worker.left() for worker in made] == [[] for _ in made]


@pytest.fixture
def client(service: Service, workers: list[Worker]) -> Iterator[Client]:
    with fxlib.connect(service.address) as made:
        yield made


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


def test_a_launcher_gets_its_own_module_back_faster_and_proven(client: Client) -> None:
    model = Lookups()
    result = client.optimize(model, lookup_workload(), name="demo")
    assert result.decision == "adopt", result.explanation
    assert result.gain is not None
    assert result.gain.low > 0.02
    assert dict(result.module.named_parameters())["bottom.weight"] is model.bottom.weight
    assert result.hardware
    assert {"fetch", "rewrite", "start", "sameness", "qps"} <= result.phase_seconds.keys()


def test_a_relaunch_is_answered_at_once(client: Client) -> None:
    torch.manual_seed(1)
    workload = lookup_workload(service_time_s=0.006)
    assert client.optimize(Lookups(), workload).adopted
    start = time.monotonic()
    again = client.optimize(Lookups(), workload)
    assert again.cached
    assert again.adopted
    assert time.monotonic() - start < 5


def test_a_worker_goes_on_after_a_model_that_hangs(client: Client) -> None:
    job = client.watch(submit(client, *hanging(), step_timeout_s=2.0), lambda _: None, timeout_s=90)
    assert job.report is not None
    assert job.report.reason is Reason.TRIAL_HUNG
    assert client.optimize(Lookups(), lookup_workload(), fresh=True).adopted


def test_a_cancelled_job_frees_its_worker(client: Client) -> None:
    job_id = submit(client, *hanging(), step_timeout_s=300.0)
    until(client, job_id, "running")
    assert client.cancel(job_id).state == "cancelled"
    start = time.monotonic()
    assert client.optimize(Lookups(), lookup_workload(), fresh=True).adopted
    assert time.monotonic() - start < 60


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
    assert job.report.decision == "adopt"


def test_a_killed_worker_leaves_nothing_and_another_finishes_its_job(
    client: Client, service: Service, workers: list[Worker], folder: Path
) -> None:
    job_id = submit(client, Lookups(), lookup_workload(service_time_s=0.003))
    until(client, job_id, "qps")
    victim = workers.pop()
    victim.kill()
    assert victim.left() == []
    workers.append(Worker(service, folder, "second"))
    job = client.watch(job_id, lambda _: None, timeout_s=120)
    assert (job.state, job.attempts, job.worker_id) == ("succeeded", 2, "second")


def test_a_worker_that_is_told_to_end_gives_its_job_back(
    client: Client, service: Service, workers: list[Worker], folder: Path
) -> None:
    job_id = submit(client, Lookups(), lookup_workload(service_time_s=0.002))
    until(client, job_id, "sameness")
    leaving = workers.pop()
    start = time.monotonic()
    leaving.end()
    assert time.monotonic() - start < 20
    assert leaving.left() == []
    assert "given back" in leaving.log.read_text()
    workers.append(Worker(service, folder, "third"))
    job = client.watch(job_id, lambda _: None, timeout_s=120)
    assert (job.state, job.attempts, job.worker_id) == ("succeeded", 1, "third")


def test_workers_leave_no_folder_behind(workers: list[Worker]) -> None:
    worker = workers.pop()
    worker.end()
    assert worker.left() == []
    assert not list(Path("/tmp").glob("fxlib-worker-*/ray*"))  # noqa: S108 - where workers have theirs
