"""Each decision is one line, and names nobody's token; metrics name models to operators alone."""

import asyncio
import json
import logging
import shutil
import stat
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from fxlib.v1 import blobs_pb2, blobs_pb2_grpc, jobs_pb2, jobs_pb2_grpc, workers_pb2
from fxlib_service import audit as audit_log
from fxlib_service.errors import Code
from fxlib_service.roles import OWNER
from tests.service.client import running
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


@pytest.mark.slow
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
        ("DEBUG", "allowed", "OK", "BlobService/Write", "ads"),
        ("INFO", "allowed", "OK", "OptimizerService/Optimize", "ads"),
        ("DEBUG", "allowed", "OK", "OptimizerService/GetJob", "ads"),
        ("WARNING", "refused", "PERMISSION_DENIED", "OptimizerService/CancelJob", "viewer"),
        ("INFO", "refused", "JOB_NOT_FOUND", "OptimizerService/CancelJob", "web"),
        ("WARNING", "refused", "UNAUTHENTICATED", "BlobService/FindMissing", ""),
    ]
    abouts = [line["about"] for _, line in lines(audit)]
    assert abouts == [ref(graph_bytes()).sha256, job.id, job.id, "", job.id, ""]
    assert all(str(line["peer"]).startswith("ipv4:127.0.0.1:") for _, line in lines(audit))
    assert not any(token(name) in audit.text for name in ("ads", "viewer", "web"))


@pytest.mark.slow
async def test_a_job_s_lines_say_what_it_is_and_what_became_of_it(
    tmp_path: Path, audit: pytest.LogCaptureFixture
) -> None:
    audit.set_level(logging.INFO, logger="fxlib.audit")
    async with guarded(tmp_path) as service:
        job = await service.submit("ads", name="ranker")
        await service.put("worker", graph_bytes())
        lease = await service.claim()
        done = workers_pb2.CompleteRequest(job_id=job.id, token=lease.token, result=answer(gain=0.5))
        await service.workers.Complete(done, metadata=bearer("worker"))
        await service.submit("ads", name="ranker")
        again = jobs_pb2.RetryJobRequest(job_id=job.id, request_id="again")
        retried = (await service.jobs.RetryJob(again, metadata=bearer("operator"))).job
        lease = await service.claim()
        failed = jobs_pb2.JobFailure(code="FAILED", message="it did not work")
        ended = workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token, failure=failed)
        await service.workers.Complete(ended, metadata=bearer("worker"))
        waits = await service.submit("ads", name="ranker", fresh=True)
        await service.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=waits.id), metadata=bearer("ads"))
    told = [line for _, line in lines(audit)]
    assert [(line["method"], line["caller"], line["state"]) for line in told] == [
        ("OptimizerService/Optimize", "ads", "queued"),
        ("WorkerService/Complete", "worker", "succeeded"),
        ("OptimizerService/Optimize", "ads", "succeeded"),
        ("OptimizerService/RetryJob", "operator", "queued"),
        ("WorkerService/Complete", "worker", "failed"),
        ("OptimizerService/Optimize", "ads", "queued"),
        ("OptimizerService/CancelJob", "ads", "cancelled"),
    ]
    assert {(line["model"], line["of_namespace"], line["decision"]) for line in told} == {("ranker", "ads", "allowed")}
    assert [line["asked_by"] for line in told] == ["ads"] * 3 + ["operator"] * 2 + ["ads"] * 2
    assert [line["cached"] for line in told if "cached" in line] == [False, True, False]
    figures = {"outcome": "adopt", "reason": "FASTER", "gain": 0.5, "gain_low": 0.4, "gain_high": 0.6}
    assert figures.items() <= told[1].items()
    assert (told[3]["about"], told[3]["new_job"]) == (job.id, retried.id)
    assert (told[4]["outcome"], told[4]["reason"]) == ("failed", "FAILED")


@pytest.mark.parametrize("code", [each.name for each in Code])
def test_what_is_the_caller_s_fault_is_a_refusal_and_what_is_the_service_s_a_failure(
    code: str, audit: pytest.LogCaptureFixture
) -> None:
    audit_log.write(
        method="OptimizerService/GetJob", code=code, caller=OWNER, peer="unix:", about="", why="it says why"
    )
    [(level, line)] = lines(audit)
    fails = {"STORAGE_FULL", "STORAGE_UNAVAILABLE", "CALL_TIMEOUT", "SHUTTING_DOWN", "INTERNAL"}
    assert (line["decision"], line["why"]) == ("failed" if code in fails else "refused", "it says why")
    grave = code in fails | {"UNAUTHENTICATED", "PERMISSION_DENIED", "QUOTA_EXCEEDED"}
    assert level == ("WARNING" if grave else "INFO")


@pytest.mark.slow
def test_the_service_s_own_log_has_a_line_for_each_job_and_each_refusal(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (service, client):
        client.put(graph_bytes())
        job = client.submit(name="ranker")
        lease = client.claim()
        assert lease is not None
        client.complete(lease)
        client.get(job.id)
        with pytest.raises(grpc.RpcError):
            client.submit(torch_version="not one")
        service.stop()
    marked = [line.partition(" fxlib.audit: ") for line in (tmp_path / "data.log").read_text().splitlines()]
    told = [(before.split()[2], json.loads(line)) for before, _, line in marked if line]
    assert [(level, line["method"].partition("/")[2], line["code"], line["caller"]) for level, line in told] == [
        ("INFO", "Optimize", "OK", "owner"),
        ("INFO", "Complete", "OK", "owner"),
        ("INFO", "Optimize", "INVALID_REQUEST", "owner"),
    ]
    assert told[2][1]["why"].startswith("torch_version: ")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_lines_go_to_a_new_file_once_the_old_one_was_moved_away_and_no_call_fails_for_want_of_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "logs" / "audit.log"
    path.parent.mkdir()
    with running(tmp_path / "data", "--audit-log", str(path)) as (_, client):
        client.put(graph_bytes())
        path.rename(path.with_suffix(".1"))
        job = client.submit()
        assert job.id in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        shutil.rmtree(path.parent)
        assert client.get(job.id).id == job.id


@pytest.mark.slow
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


@pytest.mark.slow
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
