"""The database of a service goes away, for a while or for good, while a job is measured and its launcher waits.

The times are those of real services divided by three or so: a lease has 8 s and not 30, and the database is away for
20 s and not for a minute, so that leases end meanwhile as they would. `FXLIB_AWAY_S=65` takes the minute.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import fxlib
from fxlib.client.connection import Connection
from fxlib.client.result import Result
from fxlib.spec.workload import Workload
from fxlib.v1 import jobs_pb2
from fxlib_workers.config import Config
from fxlib_workers.lease import ActiveLease, WorkerShutdownError
from fxlib_workers.service_client import ServiceClient
from tests.service.postgres import Postgres
from tests.service.support import Process, eventually, fetch
from tests.shared.real_service import _answered, adopt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AWAY_S = float(os.environ.get("FXLIB_AWAY_S", "20"))
LEASE_S = 8


class Launch:
    """A launcher that waits for its answer on a thread, and a worker that holds the job."""

    def __init__(self, service: Process, pool: ThreadPoolExecutor, deadline_s: float) -> None:
        self.phases: list[str] = []
        self._service = service
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.result: Future[Result] = pool.submit(self._launch, deadline_s)
        self.shutdown = threading.Event()
        self.client = ServiceClient(Config(service=service.listen))
        lease = None
        for _ in eventually():
            if (lease := self.client.claim(self.shutdown)) is not None:
                break
        assert lease is not None
        self.lease = lease
        connection = Connection(service.listen)
        self.answer = _answered(connection, lease, lease.request.graph, adopt)
        connection.close()

    def _launch(self, deadline_s: float) -> Result:
        workload = Workload.describe([torch.randn(2, 2)], mode="forward", optimizer="none")
        with fxlib.connect(self._service.listen) as client:
            return client.optimize(self.model, workload, deadline_s=deadline_s, progress=False)

    def watched(self) -> jobs_pb2.Job:
        with fxlib.connect(self._service.listen) as client:
            client.watch(self.lease.job_id, lambda event: self.phases.append(event.phase))
            asked = jobs_pb2.GetJobRequest(job_id=self.lease.job_id)
            job: jobs_pb2.Job = client._connection.jobs.GetJob(asked, timeout=60).job
            return job


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """One of this test's own, which nobody else misses."""
    server = Postgres()
    yield server
    for each in psutil.process_iter(["cwd"]):
        if each.info["cwd"] == str(server.folder / "data"):
            each.resume()
    server.close()


@contextmanager
def serving(folder: Path, url: str) -> Iterator[Process]:
    process = Process(folder, "--database", url, "--lease-seconds", str(LEASE_S))
    try:
        yield process
    finally:
        process.kill()


def not_ready(service: Process) -> str:
    """Return what the service says once it is not ready; it is alive all the while."""
    for _ in eventually():
        assert fetch(f"http://{service.metrics}/healthz") == "ok\n"
        with suppress(urllib.error.HTTPError):
            fetch(f"http://{service.metrics}/readyz")
            continue
        break
    with pytest.raises(urllib.error.HTTPError) as told:
        fetch(f"http://{service.metrics}/readyz")
    assert told.value.code == 503
    return told.value.read().decode()


def test_a_database_that_is_away_for_a_minute_costs_a_job_nothing(postgres: Postgres, tmp_path: Path) -> None:
    with serving(tmp_path / "data", postgres.url()) as service, ThreadPoolExecutor(3) as pool:
        launch = Launch(service, pool, deadline_s=500)
        with ActiveLease(launch.client, launch.lease, launch.shutdown) as active:
            active.report_progress("qps", "measuring")
            watching = pool.submit(launch.watched)
            time.sleep(1.0)
            postgres.stop()
            assert "the database does not answer" in not_ready(service)
            completing = pool.submit(launch.client.complete, launch.lease, launch.answer, active.check)
            time.sleep(AWAY_S)
            assert [each.done() for each in (completing, launch.result, watching)] == [False] * 3
            postgres.start()
            completing.result(100)
            assert launch.result.result(100).decision == "adopt"
            job = watching.result(100)
        assert (job.state, job.attempts) == (jobs_pb2.JOB_STATE_SUCCEEDED, 1)
        assert launch.phases.count("done") == launch.phases.count("qps") == 1
        for _ in eventually():
            if fetch(f"http://{service.metrics}/readyz") == "ok\n":
                break
        assert service.stop() == 0


def hang(server: Postgres) -> None:
    """Have a server say nothing, as one behind a network that drops everything does."""
    first = psutil.Process(int((server.folder / "data" / "postmaster.pid").read_text().split()[0]))
    for each in (first, *first.children()):
        each.suspend()


@pytest.mark.parametrize("end, ends_s", [(Postgres.stop, 10.0), (hang, 40.0)], ids=["gone", "silent"])
@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")  # told by another thread
def test_a_database_that_never_comes_back_holds_nobody_up(
    postgres: Postgres, tmp_path: Path, end: Callable[[Postgres], None], ends_s: float
) -> None:
    with serving(tmp_path / "data", postgres.url()) as service, ThreadPoolExecutor(2) as pool:
        began = time.monotonic()
        launch = Launch(service, pool, deadline_s=15.0)
        with ActiveLease(launch.client, launch.lease, launch.shutdown) as active:
            time.sleep(1.0)
            end(postgres)
            assert "the database does not answer" in not_ready(service)
            completing = pool.submit(launch.client.complete, launch.lease, launch.answer, active.check)
            result = launch.result.result(100)
            assert (result.decision, result.reason) == ("keep_original", None)
            assert 15.0 - 2.0 < time.monotonic() - began < 15.0 + 10.0
            assert not completing.done()  # the worker keeps the answer
            launch.shutdown.set()
            with pytest.raises(WorkerShutdownError):
                completing.result(ends_s)
        began = time.monotonic()
        assert service.stop() in (0, 1)  # 1: it had to end without the database's last word
        assert time.monotonic() - began < ends_s
