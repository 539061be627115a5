"""What a worker does about a job that it could not finish, with a service that only records."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fxlib.errors import CredentialError, RejectedError, RemoteError, ServiceUnavailableError
from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_workers import agent as agents
from fxlib_workers import service_client
from fxlib_workers.agent import Agent, WorkerFolder
from fxlib_workers.config import Config
from fxlib_workers.process.probe import Available, Level
from fxlib_workers.service_client import ServiceClient
from tests.service.disks import MAY_MOUNT, small_disk

LEASE = workers_pb2.Lease(job_id="job", token="token", duration_s=30)


class FakeService:
    """Keeps every lease alive, and records the outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[jobs_pb2.JobFailure] = []
        self.released = 0

    def heartbeat(self, lease: workers_pb2.Lease) -> bool:
        return True

    def release(self, lease: workers_pb2.Lease) -> None:
        self.released += 1

    def complete(self, lease: workers_pb2.Lease, outcome: jobs_pb2.JobFailure, check: object) -> None:
        self.outcomes.append(outcome)


class FakeRunner:
    """Ends each job with an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, lease: object) -> None:
        raise self.error


@pytest.fixture
def folder() -> Iterator[WorkerFolder]:
    with WorkerFolder() as made:
        yield made


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(agents, "_HOST_PAUSE_S", 0.01)
    made: Any = Agent(Config(service="127.0.0.1:1"), Available(parts=frozenset()), Level.NONE)
    made._service.close()
    made._service = FakeService()
    return made


def outcomes(agent: Any, folder: WorkerFolder, error: Exception) -> list[jobs_pb2.JobFailure]:
    """Return what the service is told of a job that ends with an error."""
    agent._run_job(FakeRunner(error), LEASE, folder)
    found: list[jobs_pb2.JobFailure] = agent._service.outcomes
    return found


@pytest.mark.parametrize("code", ["INVALID_REQUEST", "INVALID_GRAPH", "MESSAGE_TOO_LARGE"])
def test_an_answer_that_the_service_refuses_fails_the_job(agent: Any, folder: WorkerFolder, code: str) -> None:
    (failure,) = outcomes(agent, folder, RejectedError("result.graph: is none", code=code))
    assert (failure.code, failure.message) == ("WORKER_FAILED", "RejectedError: result.graph: is none")


@pytest.mark.parametrize(
    "error",
    [
        ServiceUnavailableError("away"),
        RejectedError("lost", code="LEASE_LOST"),
        RejectedError("busy", code="SERVICE_BUSY"),
        RejectedError("a blob of it was lost behind its upload", code="BLOB_MISSING"),
        RejectedError("the service itself failed", code="INTERNAL"),
    ],
)
def test_an_answer_that_another_attempt_may_deliver_leaves_the_job_to_it(
    agent: Any, folder: WorkerFolder, error: RemoteError
) -> None:
    assert outcomes(agent, folder, error) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EMFILE])
def test_a_job_that_the_host_has_no_room_for_is_given_back_twice(agent: Any, folder: WorkerFolder, number: int) -> None:
    error = OSError(number, "no")
    for given_back in (1, 2):
        assert outcomes(agent, folder, error) == []
        assert agent._service.released == given_back
    assert [each.code for each in outcomes(agent, folder, error)] == ["WORKER_FAILED"]


def test_a_worker_whose_folder_was_deleted_gives_its_job_back_and_ends(agent: Any, folder: WorkerFolder) -> None:
    assert agent._may_write(folder)
    shutil.rmtree(folder.path)
    assert outcomes(agent, folder, FileNotFoundError(errno.ENOENT, "no")) == []
    assert agent._service.released == 1
    assert not agent._may_write(folder)
    assert agent._shutdown.is_set()
    assert "was deleted" in str(agent._folder_gone)


@pytest.mark.skipif(not MAY_MOUNT, reason="only root mounts a small disk")
def test_a_worker_takes_no_job_while_its_disk_is_full(
    agent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk.path))
        with WorkerFolder() as folder:
            disk.fill()
            assert not agent._may_write(folder)
            disk.clear()
            assert agent._may_write(folder)
            assert not agent._shutdown.is_set()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a-token-of-a-worker-that-is-long-enough")
    path.chmod(0o600)
    return path


def test_a_job_is_released_without_a_token_to_send(token_file: Path) -> None:
    client = ServiceClient(Config(service="127.0.0.1:1", token_file=token_file))
    token_file.unlink()
    client.release(LEASE)
    client.close()


def test_an_answer_waits_for_a_token_that_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_client, "_AWAY_S", 0.01)
    client: Any = ServiceClient(Config(service="127.0.0.1:1"))
    faults = iter([CredentialError("there is no token")])

    def complete(request: workers_pb2.CompleteRequest, timeout: float) -> None:
        for fault in faults:
            raise fault

    client._stub = SimpleNamespace(Complete=complete)
    client.complete(LEASE, jobs_pb2.JobFailure(code="WORKER_FAILED"), lambda: None)
    client.close()
