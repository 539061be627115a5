"""Blobs that rot on a real service's disk: the launcher uploads them again, asks once more, and gets its answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch.fx import GraphModule

import fxlib
from fxlib import Client, Workload
from fxlib.client import session
from fxlib.client.blobs import download
from fxlib.client.connection import Connection, Deadline
from fxlib.errors import FxlibWarning, RejectedError
from fxlib.protocol import blob_from_proto, blobs_of
from fxlib.spec.report import Report
from fxlib.v1 import jobs_pb2, workers_pb2, workers_pb2_grpc
from tests.client.models import Clicks, workload
from tests.shared.real_service import adopt, real_service, scripted_worker

pytestmark = pytest.mark.slow


class Fetching:
    """Answers as `adopt` does, once it has read the batches; says so, as a worker does, where they are damaged."""

    def __init__(self, address: str) -> None:
        self._connection = Connection(address)
        self.damaged = 0
        self.asked: set[str] = set()
        """Of the blobs that the launcher uploaded."""

    def __call__(self, lease: workers_pb2.Lease, graph: GraphModule) -> tuple[Report, GraphModule]:
        batches = list(blobs_of(lease.request.workload))
        self.asked |= {each.sha256 for each in (lease.request.graph, *batches)}
        try:
            for ref in batches:
                download(self._connection, blob_from_proto(ref), Deadline(60))
        except RejectedError as error:
            self.damaged += 1
            failure = jobs_pb2.JobFailure(code=error.code, message=str(error))
            stub = self._connection.stub(workers_pb2_grpc.WorkerServiceStub)
            stub.Complete(workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token, failure=failure))
            raise grpc.RpcError from error  # the job has ended
        return adopt(lease, graph)


def flip(data: Path, sha256: str) -> None:
    """Change one bit of a stored blob."""
    [path] = [each for each in data.rglob(sha256) if each.is_file()]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


@contextmanager
def serving(data: Path) -> Iterator[tuple[Client, Fetching]]:
    with real_service(data) as address:
        worker = Fetching(address)
        with scripted_worker(address, worker), fxlib.connect(address, patience_s=60) as client:
            yield client, worker


def test_a_graph_and_batches_that_rot_are_uploaded_again(tmp_path: Path) -> None:
    asked = Workload(batches=[(torch.randn(4, 8), torch.randint(100, (4,)))], servers=workload().servers)
    with serving(tmp_path) as (client, worker):
        assert client.optimize(Clicks(), asked).decision == "adopt"
        assert len(worker.asked) > 1
        for sha256 in worker.asked:
            flip(tmp_path, sha256)
        again = client.optimize(Clicks(), asked, fresh=True)
        assert (again.decision, worker.damaged) == ("adopt", 1)


def test_an_answer_that_rots_before_it_is_fetched_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, first = list[str](), threading.Event()

    def fetch(connection: Connection, blob: Any, deadline: Deadline) -> bytes:
        if not first.is_set():
            first.set()
            flip(tmp_path, blob.sha256)
        fetched.append(blob.sha256)
        return download(connection, blob, deadline)

    with serving(tmp_path) as (client, _):
        monkeypatch.setattr(session, "download", fetch)
        assert client.optimize(Clicks(), workload()).decision == "adopt"
    assert len(fetched) == 2


def test_an_answer_that_rots_each_time_is_asked_for_once_more_and_no_oftener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def fetch(connection: Connection, blob: Any, deadline: Deadline) -> bytes:
        asked.append(blob.sha256)
        flip(tmp_path, blob.sha256)
        return download(connection, blob, deadline)

    model = Clicks()
    with serving(tmp_path) as (client, _):
        monkeypatch.setattr(session, "download", fetch)
        with pytest.warns(FxlibWarning, match="training goes on with the original module"):
            assert client.optimize(model, workload()).decision == "keep_original"
    assert len(asked) == 2
