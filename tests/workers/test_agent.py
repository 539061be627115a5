"""What a worker does about a job that it could not finish, with a service that only records."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fxlib.errors import CredentialError, RejectedError, RemoteError, ServiceUnavailableError
from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_workers import service_client
from fxlib_workers.agent import Agent
from fxlib_workers.config import Config
from fxlib_workers.process.probe import Available, Level
from fxlib_workers.service_client import ServiceClient

LEASE = workers_pb2.Lease(job_id="job", token="token", duration_s=30)


class FakeService:
    """Keeps every lease alive, and records the outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[jobs_pb2.JobFailure] = []

    def heartbeat(self, lease: workers_pb2.Lease) -> bool:
        return True

    def complete(self, lease: workers_pb2.Lease, outcome: jobs_pb2.JobFailure, check: object) -> None:
        self.outcomes.append(outcome)


class FakeRunner:
    """Ends each job with an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, lease: object) -> None:
        raise self.error


def outcomes(error: Exception) -> list[jobs_pb2.JobFailure]:
    """Return what the service is told of a job that ends with an error."""
    agent: Any = Agent(Config(service="127.0.0.1:1"), Available(parts=frozenset()), Level.NONE)
    agent._service.close()
    agent._service = service = FakeService()
    agent._run_job(FakeRunner(error), LEASE)
    return service.outcomes


@pytest.mark.parametrize("code", ["INVALID_REQUEST", "INVALID_GRAPH", "MESSAGE_TOO_LARGE"])
def test_an_answer_that_the_service_refuses_fails_the_job(code: str) -> None:
    (failure,) = outcomes(RejectedError("result.graph: is none", code=code))
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
def test_an_answer_that_another_attempt_may_deliver_leaves_the_job_to_it(error: RemoteError) -> None:
    assert outcomes(error) == []


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
