"""Each decision is one line, and names nobody's token; metrics name models to operators alone."""

import asyncio
import json
import logging
import stat
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from fxlib.v1 import blobs_pb2, blobs_pb2_grpc, jobs_pb2, jobs_pb2_grpc, workers_pb2
from fxlib_service import audit as audit_log
from tests.service.principals import bearer, token
from tests.service.support import answer, graph_bytes, local, ref, request
from tests.service.test_roles import Guarded, guarded
from tests.shared.real_service import real_service


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    records = [each for each in caplog.records if each.name == "fxlib.audit"]
    return [(each.levelname, json.loads(each.getMessage())) for each in records]


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="fxlib.audit")
    return caplog


async def test_each_call_is_one_line(tmp_path: Path, audit: pytest.LogCaptureFixture) -> None:
    async with guarded(tmp_path) as service:
        job = await service.submit("ads", fresh=True)
        await service.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job.id), metadata=bearer("ads"))
        with pytest.raises(grpc.aio.AioRpcError):
            await service.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job.id), metadata=bearer("viewer"))
        with pytest.raises(grpc.aio.AioRpcError):
            await service.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job.id), metadata=bearer("web"))
        with pytest.raises(grpc.aio.AioRpcError):
            await service.blobs.FindMissing(blobs_pb2.FindMissingRequest())
    told = [(level, *(line[key] for key in ("decision", "code", "method", "caller"))) for level, line in lines(audit)]
    assert told == [
        ("INFO", "allowed", "OK", "BlobService/Write", "ads"),
        ("INFO", "allowed", "OK", "OptimizerService/Optimize", "ads"),
        ("DEBUG", "allowed", "OK", "OptimizerService/GetJob", "ads"),
        ("WARNING", "refused", "PERMISSION_DENIED", "OptimizerService/CancelJob", "viewer"),
        ("INFO", "allowed", "JOB_NOT_FOUND", "OptimizerService/CancelJob", "web"),
        ("WARNING", "refused", "UNAUTHENTICATED", "BlobService/FindMissing", ""),
    ]
    abouts = [line["about"] for _, line in lines(audit)]
    assert abouts == [ref(graph_bytes()).sha256, job.id, job.id, "", job.id, ""]
    assert all(str(line["peer"]).startswith("ipv4:127.0.0.1:") for _, line in lines(audit))
    assert not any(token(name) in audit.text for name in ("ads", "viewer", "web"))


async def test_callers_that_nobody_knows_write_few_lines(tmp_path: Path, audit: pytest.LogCaptureFixture) -> None:
    async with guarded(tmp_path) as service:
        for _ in range(100):
            with pytest.raises(grpc.aio.AioRpcError):
                await service.jobs.ListJobs(jobs_pb2.ListJobsRequest())
        for _ in range(30):
            await service.jobs.ListJobs(jobs_pb2.ListJobsRequest(), metadata=bearer("ads"))
    told = [line for _, line in lines(audit)]
    assert sum(line["caller"] == "ads" for line in told) == 30
    unknown = [line for line in told if line["caller"] == ""]
    assert 1 <= len(unknown) < 100
    assert len(unknown) + sum(int(str(line.get("left_out", 0))) for line in unknown) <= 100


def test_lines_are_limited_by_the_second_and_the_others_counted() -> None:
    now = [0.0]
    limiter = audit_log.Limiter(2, lambda: now[0])
    assert [limiter.passes() for _ in range(5)] == [0, 0, None, None, None]
    now[0] = 1.5
    assert [limiter.passes() for _ in range(3)] == [3, 0, None]
    now[0] = 9.0
    assert limiter.passes() == 1


async def test_it_is_recorded_who_asked_and_whose_worker_measured(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        job = await service.submit("ads")
        assert (job.asked_by, job.measured_by) == ("ads", "")
        lease = await service.claim("worker")
        await service.put("worker", graph_bytes())
        done = workers_pb2.CompleteRequest(job_id=job.id, token=lease.token, result=answer())
        await service.workers.Complete(done, metadata=bearer("worker"))
        cached = await service.submit("ads")
        assert (cached.cached, cached.asked_by, cached.measured_by) == (True, "ads", "worker")


def test_a_file_has_every_line_and_is_nobody_else_s(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with (
        real_service(tmp_path, "--audit-log", str(path)) as address,
        grpc.insecure_channel(address) as channel,
        pytest.raises(grpc.RpcError),
    ):
        jobs_pb2_grpc.OptimizerServiceStub(channel).ListPasses(jobs_pb2.ListPassesRequest(), timeout=60)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    [line] = path.read_text().splitlines()
    told = json.loads(line)
    assert (told["level"], told["call"]["code"]) == ("WARNING", "UNAUTHENTICATED")


def test_callers_that_leave_in_the_middle_of_a_call_do_not_end_the_service(tmp_path: Path) -> None:
    with real_service(tmp_path) as address, grpc.insecure_channel(local(address)) as channel:
        jobs, blobs = jobs_pb2_grpc.OptimizerServiceStub(channel), blobs_pb2_grpc.BlobServiceStub(channel)
        chunk = blobs_pb2.WriteRequest(blob=ref(graph_bytes()), data=graph_bytes())
        blobs.Write(iter([chunk]), timeout=60)
        job = jobs.Optimize(request(fresh=True), timeout=60).job
        for _ in range(100):
            watching = jobs.WatchJob(jobs_pb2.WatchJobRequest(job_id=job.id), timeout=60)
            next(watching)
            watching.cancel()
        assert jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job.id), timeout=60).job.id == job.id


async def scraped(service: Guarded, who: str) -> tuple[int, str]:
    shown = {"Authorization": f"Bearer {token(who)}"} if who else {}

    def ask() -> tuple[int, str]:
        asked = urllib.request.Request(service.metrics, headers=shown)  # noqa: S310  # our own address
        try:
            with urllib.request.urlopen(asked, timeout=60) as response:  # noqa: S310
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    return await asyncio.to_thread(ask)


async def test_metrics_name_models_to_operators_alone(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        await service.put("worker", graph_bytes())
        job = await service.submit("ads", fresh=True, name="ads-secret-model")
        lease = await service.claim("worker")
        done = workers_pb2.CompleteRequest(job_id=job.id, token=lease.token, result=answer())
        await service.workers.Complete(done, metadata=bearer("worker"))
        status, text = await scraped(service, "operator")
        assert status == 200
        assert 'fxlib_model_adopted{fxlib_namespace="ads",model="ads-secret-model"}' in text
        status, text = await scraped(service, "viewer")
        assert status == 200
        assert "fxlib_queue_depth" in text
        assert "secret" not in text
        assert [(await scraped(service, who))[0] for who in ("ads", "ads-viewer", "worker", "", "stranger")] == [
            403, 403, 403, 401, 401,
        ]  # fmt: skip
