"""Role by method by own and foreign object, over real sockets: every cell is tried, every refusal as designed."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from fxlib.v1 import blobs_pb2, blobs_pb2_grpc, jobs_pb2, jobs_pb2_grpc, workers_pb2, workers_pb2_grpc
from fxlib_service.config import Address, Config, Limits
from fxlib_service.roles import MAY_CALL
from fxlib_service.server import Server
from tests.service.principals import bearer, write_policy
from tests.service.support import answer, graph_bytes, ref, request, worker

pytestmark = pytest.mark.slow

FAILURE = jobs_pb2.JobFailure(code="FORGED")
ANYWHERE = Address(host="127.0.0.1", port=0)
CALLERS = ("ads", "ads-viewer", "viewer", "worker", "operator", "", "stranger")

OWN = {
    # method: what ads, its viewer, the viewer of all, a worker and an operator are told about what is the ads' own
    "OptimizerService/Optimize": "ok denied denied denied ok",
    "OptimizerService/GetJob": "ok ok ok denied ok",
    "OptimizerService/WatchJob": "ok ok ok denied ok",
    "OptimizerService/ListJobs": "ok ok ok denied ok",
    "OptimizerService/CancelJob": "ok denied denied denied ok",
    "OptimizerService/RetryJob": "ok denied denied denied ok",
    "OptimizerService/ReportLive": "INVALID_REQUEST denied denied denied INVALID_REQUEST",  # it has no answer yet
    "OptimizerService/GetCapabilities": "ok ok ok ok ok",
    "OptimizerService/ListPasses": "ok ok ok ok ok",
    "BlobService/FindMissing": "ok denied denied ok ok",
    "BlobService/QueryWrite": "ok denied denied ok ok",
    "BlobService/Write": "ok denied denied ok ok",
    "BlobService/Read": "ok denied denied ok ok",
    "WorkerService/Claim": "denied denied denied ok denied",
    "WorkerService/Heartbeat": "denied denied denied LEASE_LOST denied",
    "WorkerService/Report": "denied denied denied LEASE_LOST denied",
    "WorkerService/Complete": "denied denied denied LEASE_LOST denied",
    "WorkerService/Release": "denied denied denied LEASE_LOST denied",
}
FOREIGN = OWN | {
    # and about what is the web's
    "OptimizerService/Optimize": "denied denied denied denied ok",
    "OptimizerService/GetJob": "JOB_NOT_FOUND JOB_NOT_FOUND ok denied ok",
    "OptimizerService/WatchJob": "JOB_NOT_FOUND JOB_NOT_FOUND ok denied ok",
    "OptimizerService/ListJobs": "denied denied ok denied ok",
    "OptimizerService/CancelJob": "JOB_NOT_FOUND denied denied denied ok",
    "OptimizerService/RetryJob": "JOB_NOT_FOUND denied denied denied ok",
    "OptimizerService/ReportLive": "JOB_NOT_FOUND denied denied denied INVALID_REQUEST",
    "BlobService/Read": "BLOB_NOT_FOUND denied denied ok ok",
}
STATUS = {
    "ok": grpc.StatusCode.OK,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "JOB_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "BLOB_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "INVALID_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
    "BLOB_MISSING": grpc.StatusCode.FAILED_PRECONDITION,
    "LEASE_LOST": grpc.StatusCode.FAILED_PRECONDITION,
}


@dataclass
class Guarded:
    """A service with a policy; each call is made by a principal."""

    channel: Any
    metrics: str

    def __post_init__(self) -> None:
        self.jobs: Any = jobs_pb2_grpc.OptimizerServiceStub(self.channel)
        self.blobs: Any = blobs_pb2_grpc.BlobServiceStub(self.channel)
        self.workers: Any = workers_pb2_grpc.WorkerServiceStub(self.channel)

    async def put(self, who: str, data: bytes) -> None:
        await self.blobs.Write(iter([blobs_pb2.WriteRequest(blob=ref(data), data=data)]), metadata=bearer(who))

    async def submit(self, who: str, data: bytes | None = None, **options: Any) -> jobs_pb2.Job:
        data = graph_bytes() if data is None else data
        await self.put(who, data)
        asked = request(graph=data, **options)
        job: jobs_pb2.Job = (await self.jobs.Optimize(asked, metadata=bearer(who))).job
        return job

    async def claim(self, who: str = "worker") -> workers_pb2.Lease:
        asked = workers_pb2.ClaimRequest(worker=worker(who), wait_s=5)
        lease: workers_pb2.Lease = (await self.workers.Claim(asked, metadata=bearer(who))).lease
        return lease

    async def told(self, who: str, method: str, job: jobs_pb2.Job, data: bytes) -> str:
        """Call a method about a job and a blob; return "ok", or the error's code once its status is as designed."""
        service, _, name = method.partition("/")
        stub = {"OptimizerService": self.jobs, "BlobService": self.blobs, "WorkerService": self.workers}[service]
        asked = _asked(method, job, data)
        try:
            call = getattr(stub, name)(iter([asked]) if name == "Write" else asked, metadata=bearer(who), timeout=60)
            if name == "WatchJob":
                await call.read()
                call.cancel()
            elif name == "Read":
                assert b"".join([chunk.data async for chunk in call]) == data
            else:
                await call
        except grpc.aio.AioRpcError as error:
            code = reason(error)
            return code if error.code() is STATUS[code] else f"{code} as {error.code()}"
        return "ok"


def reason(error: grpc.aio.AioRpcError) -> str:
    metadata: Any = error.trailing_metadata()
    info = error_details_pb2.ErrorInfo()
    for each in status_pb2.Status.FromString(dict(metadata)["grpc-status-details-bin"]).details:
        if each.Unpack(info):
            return info.reason
    raise AssertionError("no ErrorInfo")


def _asked(method: str, job: jobs_pb2.Job, data: bytes) -> Message:
    lease: dict[str, Any] = {"job_id": job.id, "token": "guessed"}
    asked: dict[str, Callable[[], Message]] = {
        "OptimizerService/Optimize": lambda: request(graph=data, namespace=job.namespace, fresh=True),
        "OptimizerService/GetJob": lambda: jobs_pb2.GetJobRequest(job_id=job.id),
        "OptimizerService/WatchJob": lambda: jobs_pb2.WatchJobRequest(job_id=job.id),
        "OptimizerService/ListJobs": lambda: jobs_pb2.ListJobsRequest(namespace=job.namespace),
        "OptimizerService/CancelJob": lambda: jobs_pb2.CancelJobRequest(job_id=job.id),
        "OptimizerService/RetryJob": lambda: jobs_pb2.RetryJobRequest(job_id=job.id, request_id=uuid.uuid4().hex),
        "OptimizerService/ReportLive": lambda: jobs_pb2.ReportLiveRequest(job_id=job.id),
        "OptimizerService/GetCapabilities": jobs_pb2.GetCapabilitiesRequest,
        "OptimizerService/ListPasses": jobs_pb2.ListPassesRequest,
        "BlobService/FindMissing": lambda: blobs_pb2.FindMissingRequest(blobs=[ref(data)]),
        "BlobService/QueryWrite": lambda: blobs_pb2.QueryWriteRequest(blob=ref(data)),
        "BlobService/Write": lambda: blobs_pb2.WriteRequest(blob=ref(data), data=data),
        "BlobService/Read": lambda: blobs_pb2.ReadRequest(blob=ref(data)),
        "WorkerService/Claim": lambda: workers_pb2.ClaimRequest(worker=worker(torch_version="1.0")),
        "WorkerService/Heartbeat": lambda: workers_pb2.HeartbeatRequest(**lease),
        "WorkerService/Report": lambda: workers_pb2.ReportRequest(**lease, phase="qps"),
        "WorkerService/Complete": lambda: workers_pb2.CompleteRequest(**lease, failure=FAILURE),
        "WorkerService/Release": lambda: workers_pb2.ReleaseRequest(**lease),
    }
    return asked[method]()


@asynccontextmanager
async def guarded(
    folder: Path, more: str = "", limits: Limits | None = None, *, database_url: str = ""
) -> AsyncIterator[Guarded]:
    config = Config(
        database_url=database_url,
        data=folder / "data",
        listen=ANYWHERE,
        metrics=ANYWHERE,
        policy=write_policy(folder, more),
        limits=limits or Limits(),
        shutdown_grace_s=0.5,
    )
    server = Server(config)
    try:
        listen, metrics = await server.start()
        async with grpc.aio.insecure_channel(str(listen)) as channel:
            yield Guarded(channel, f"http://{metrics}/metrics")
    finally:
        await server.stop()


@pytest.mark.parametrize("index", range(len(CALLERS)), ids=lambda index: CALLERS[index] or "nobody")
async def test_every_cell_of_the_matrix_is_as_designed(tmp_path: Path, index: int) -> None:
    who = CALLERS[index]
    assert OWN.keys() == MAY_CALL.keys()
    async with guarded(tmp_path) as service:
        for expected, owner, data in ((OWN, "ads", graph_bytes(3)), (FOREIGN, "web", graph_bytes(4))):
            job = await service.submit(owner, data, fresh=True)
            wanted = {
                method: "UNAUTHENTICATED" if who in ("", "stranger") else cells.split()[index]
                for method, cells in expected.items()
            }
            wanted = {method: "PERMISSION_DENIED" if cell == "denied" else cell for method, cell in wanted.items()}
            in_order = sorted(wanted, key=lambda method: method == "BlobService/Write")  # what it sent, it has
            told = {method: await service.told(who, method, job, data) for method in in_order}
            assert told == wanted, owner


async def test_a_request_that_is_refused_is_not_even_parsed(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        call = service.channel.unary_unary("/fxlib.v1.WorkerService/Complete")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff garbage", metadata=bearer("ads"))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_listing_without_a_namespace_shows_a_client_its_own_jobs(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        own, foreign = await service.submit("ads", fresh=True), await service.submit("web", fresh=True)
        seen = {
            who: {job.id for job in (await service.jobs.ListJobs(_ALL, metadata=bearer(who))).jobs}
            for who in ("ads", "ads-viewer", "web", "viewer", "operator")
        }
        assert seen["ads"] == seen["ads-viewer"] == {own.id}
        assert seen["web"] == {foreign.id}
        assert seen["viewer"] == seen["operator"] == {own.id, foreign.id}


_ALL = jobs_pb2.ListJobsRequest()


async def test_a_client_s_job_is_of_its_own_namespace_whatever_it_leaves_out(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        assert (await service.submit("ads", namespace="")).namespace == "ads"
        assert (await service.submit("ads", namespace="ads")).namespace == "ads"


async def test_request_ids_of_two_namespaces_do_not_meet(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        first = await service.submit("ads", request_id="same", fresh=True)
        second = await service.submit("web", graph_bytes(5), request_id="same", fresh=True)
        assert first.id != second.id


async def test_a_forged_answer_is_refused_and_the_true_one_taken(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        job = await service.submit("ads", fresh=True)
        lease = await service.claim()
        done = workers_pb2.CompleteRequest(job_id=job.id, token=lease.token, result=answer())
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # by a client that has learned the lease's token
            await service.workers.Complete(done, metadata=bearer("web"))
        assert reason(caught.value) == "PERMISSION_DENIED"
        await service.workers.Complete(done, metadata=bearer("worker"))
        asked = jobs_pb2.GetJobRequest(job_id=job.id)
        assert (await service.jobs.GetJob(asked, metadata=bearer("ads"))).job.result == answer()


async def test_no_refusal_says_which_token_was_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with guarded(tmp_path) as service:
        for secret in ("the-token-of-ads-almost", "almost"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.jobs.GetCapabilities(
                    jobs_pb2.GetCapabilitiesRequest(), metadata=(("authorization", f"Bearer {secret}"),)
                )
            assert secret not in str(caught.value.details())
        await asyncio.sleep(0)
    assert "almost" not in caplog.text
