"""One job of a worker, with a service and a driver that only record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fxlib.errors import RejectedError, WireError
from fxlib.protocol import blob_ref
from fxlib.reasons import Reason
from fxlib.spec.job import Blob
from fxlib.spec.report import Estimate, Report
from fxlib.v1 import graph_pb2, jobs_pb2, workers_pb2
from fxlib_workers.config import Config
from fxlib_workers.exchange import JobFolder, ReportProgress
from fxlib_workers.lease import ActiveLease, WorkerShutdownError
from fxlib_workers.process.forking import Forker
from fxlib_workers.process.host_lock import HostLock
from fxlib_workers.run_job import JobRunner
from fxlib_workers.service_client import Check, ServiceClient
from tests.workers.cases import Lookups, lookup_workload, request
from tests.workers.process.contained import everything

pytestmark = pytest.mark.slow


class FakeService:
    """A service that has blobs, and records answers."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        self.blobs = blobs
        self.info = jobs_pb2.WorkerInfo(hardware="a machine")
        self.outcomes: list[jobs_pb2.JobResult | jobs_pb2.JobFailure] = []
        self.stored: list[bytes] = []
        self.refusals: list[str] = []

    def fetch(self, ref: graph_pb2.BlobRef) -> bytes:
        if ref.sha256 not in self.blobs:
            raise RejectedError("no such blob", code="BLOB_NOT_FOUND")
        return self.blobs[ref.sha256]

    def store_all(self, lease: workers_pb2.Lease, blobs: Mapping[str, bytes], check: Check) -> None:
        self.stored.extend(blobs.values())

    def store(self, lease: workers_pb2.Lease, data: bytes, check: Check) -> Blob:
        self.stored.append(data)
        return Blob(sha256=blob_ref(data).sha256, size=len(data))

    def complete(
        self, lease: workers_pb2.Lease, outcome: jobs_pb2.JobResult | jobs_pb2.JobFailure, check: Check
    ) -> None:
        if self.refusals:
            raise RejectedError("refused", code=self.refusals.pop())
        self.outcomes.append(outcome)


class FakeDriver:
    """Adopts everything."""

    def run(
        self,
        folder: JobFolder,
        report_progress: ReportProgress,
        check: Callable[[], None],
        plans: Mapping[str, Callable[[], object]],
    ) -> Report:
        gain = Estimate(value=0.5, low=0.4, high=0.6)
        return Report(decision="adopt", reason=Reason.FASTER, explanation="faster", gain=gain)


@pytest.fixture
def given(tmp_path: Path) -> JobFolder:
    return request(tmp_path / "given", Lookups(), lookup_workload())


def runner(tmp_path: Path, service: FakeService, forker: Forker) -> JobRunner:
    root = tmp_path / "root"
    root.mkdir()
    lock = HostLock(tmp_path / "lock")
    return JobRunner(
        config=Config(),
        service=service,  # type: ignore[arg-type]
        lock=lock,
        driver=FakeDriver(),  # type: ignore[arg-type]
        forker=forker,
        containment=everything(),
        root=root,
    )


def active(given: JobFolder, shutdown: threading.Event | None = None) -> ActiveLease:
    message = workers_pb2.Lease(job_id="job", token="t", duration_s=30, request=given.request())
    return ActiveLease(None, message, shutdown or threading.Event())  # type: ignore[arg-type]


def test_an_answer_is_completed_with_its_graph(given: JobFolder, tmp_path: Path, forker: Forker) -> None:
    original = given.original.read_bytes()
    service = FakeService({blob_ref(original).sha256: original})
    made = runner(tmp_path, service, forker)
    made.run(active(given))
    (result,) = service.outcomes
    assert isinstance(result, jobs_pb2.JobResult)
    assert result.decision == jobs_pb2.DECISION_ADOPT
    assert result.graph.sha256 == blob_ref(service.stored[0]).sha256
    assert result.hardware == "a machine"
    assert not list(made.root.iterdir())


def test_a_request_that_cannot_be_read_fails_the_job(given: JobFolder, tmp_path: Path, forker: Forker) -> None:
    service = FakeService({given.request().graph.sha256: b"\xff\xff not a graph"})
    runner(tmp_path, service, forker).run(active(given))
    (failure,) = service.outcomes
    assert isinstance(failure, jobs_pb2.JobFailure)
    assert failure.code == "UNREADABLE_REQUEST"


def test_a_job_whose_graph_the_service_has_lost_fails_with_that_reason(
    given: JobFolder, tmp_path: Path, forker: Forker
) -> None:
    service = FakeService({})
    runner(tmp_path, service, forker).run(active(given))
    (failure,) = service.outcomes
    assert isinstance(failure, jobs_pb2.JobFailure)
    assert failure.code == "BLOB_NOT_FOUND"


def test_an_answer_whose_graph_the_service_has_lost_is_uploaded_again(
    given: JobFolder, tmp_path: Path, forker: Forker
) -> None:
    original = given.original.read_bytes()
    service = FakeService({blob_ref(original).sha256: original})
    service.refusals = ["BLOB_MISSING"]
    runner(tmp_path, service, forker).run(active(given))
    assert len(service.outcomes) == 1
    assert service.stored[: len(service.stored) // 2] == service.stored[len(service.stored) // 2 :]


def test_a_job_that_is_given_back_leaves_no_folder(given: JobFolder, tmp_path: Path, forker: Forker) -> None:
    original = given.original.read_bytes()
    made = runner(tmp_path, FakeService({blob_ref(original).sha256: original}), forker)
    shutdown = threading.Event()
    shutdown.set()
    with pytest.raises(WorkerShutdownError):
        made.run(active(given, shutdown))
    assert not list(made.root.iterdir())


@pytest.mark.parametrize("sha256", ["../../etc/passwd", "", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_an_address_that_is_no_digest_is_refused(sha256: str) -> None:
    service = ServiceClient(Config(service="127.0.0.1:1"))
    with pytest.raises(WireError, match="SHA-256"):
        service.fetch(graph_pb2.BlobRef(sha256=sha256, size=1))
    service.close()


def test_a_rewrite_that_leaves_a_link_has_no_other_file_read(given: JobFolder) -> None:
    elsewhere, name = given.path.parent / "elsewhere", "0" * 64
    elsewhere.mkdir()
    (elsewhere / name).write_text("a token")
    given._blobs.rename(given.path / "moved")
    given._blobs.symlink_to(elsewhere)
    graph = graph_pb2.Graph(storages=[graph_pb2.Storage(data=graph_pb2.BlobRef(sha256=name))])
    given.original.unlink()
    given.original.symlink_to(elsewhere / name)
    for read in (given.blobs, lambda: given.values_in(graph.SerializeToString()), given.graph):
        with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
            read()


@pytest.mark.parametrize("name", ["secret", "../../secret", "/etc/passwd"])
def test_a_graph_that_a_rewrite_has_written_names_no_other_file_than_a_blob(given: JobFolder, name: str) -> None:
    (given.path.parent / "secret").write_text("a token")
    graph = graph_pb2.Graph(storages=[graph_pb2.Storage(data=graph_pb2.BlobRef(sha256=name))])
    with pytest.raises(OSError, match="not the name of a blob"):
        given.values_in(graph.SerializeToString())
