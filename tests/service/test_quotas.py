"""A namespace takes no more of the service than its quota, and learns when to come back; another notices nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
from google.rpc import error_details_pb2, status_pb2

from fxlib.errors import FxlibError
from fxlib.protocol import trial_to_proto
from fxlib.spec.job import TrialOptions
from fxlib.v1 import blobs_pb2, jobs_pb2
from fxlib_service.blobs.base import CheckedBlob
from fxlib_service.config import Limits
from fxlib_service.errors import Code, ServiceError
from fxlib_service.policy import Policy
from fxlib_service.quotas import Quota, Quotas, StorageQuota
from fxlib_service.stores import schema
from fxlib_service.stores.postgres import PostgresJobStore
from tests.service.postgres import Postgres
from tests.service.principals import bearer, write_policy
from tests.service.support import fields, make_service, ref, request, submit
from tests.service.test_roles import Guarded, guarded


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str, float]:
    """Return status, code, quota and the seconds after which to come back."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    metadata: Any = caught.value.trailing_metadata()
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for each in status_pb2.Status.FromString(dict(metadata)["grpc-status-details-bin"]).details:
        for kind in (info, retry):
            if each.Is(kind.DESCRIPTOR):
                each.Unpack(kind)
    return caught.value.code(), info.reason, info.metadata["quota"], retry.retry_delay.ToMilliseconds() / 1e3


FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.slow
async def test_stored_bytes_are_bounded_with_those_of_unfinished_uploads(tmp_path: Path) -> None:
    async with guarded(tmp_path, "[namespaces.ads]\nstored_bytes = 1000") as service:
        await service.put("ads", bytes(400))
        unfinished = b"u" * 500
        part = blobs_pb2.WriteRequest(blob=ref(unfinished), data=unfinished[:300])
        await service.blobs.Write(iter([part]), metadata=bearer("ads"))
        assert await refused(service.put("ads", b"x" * 400)) == (FULL, "QUOTA_EXCEEDED", "stored_bytes", 60.0)
        await service.put("ads", b"x" * 300)
        await service.put("ads", bytes(400))  # what one has, costs nothing more
        await service.put("web", b"w" * 5000)


@pytest.mark.slow
async def test_uploads_that_are_open_count_as_large_as_they_were_announced(tmp_path: Path) -> None:
    async with guarded(tmp_path, "[quota]\nstored_bytes = 1000") as service:
        opened, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[blobs_pb2.WriteRequest]:
            yield blobs_pb2.WriteRequest(blob=ref(b"s" * 900), data=b"s" * 10)
            opened.set()
            await go_on.wait()
            yield blobs_pb2.WriteRequest(offset=10, data=b"s" * 890)

        uploading = asyncio.ensure_future(service.blobs.Write(slowly(), metadata=bearer("ads")))
        await opened.wait()
        asked = blobs_pb2.QueryWriteRequest(blob=ref(b"s" * 900))
        while not (await service.blobs.QueryWrite(asked, metadata=bearer("ads"))).committed_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await refused(service.put("ads", b"x" * 200)))[1] == "QUOTA_EXCEEDED"
        go_on.set()
        assert (await uploading).committed_bytes == 900


@pytest.mark.slow
async def test_a_blob_that_one_has_is_not_taken_with_another_size(tmp_path: Path) -> None:
    async with guarded(tmp_path, "[quota]\nstored_bytes = 1000") as service:
        await service.put("ads", bytes(400))
        larger = blobs_pb2.WriteRequest(blob=ref(bytes(400)), data=bytes(5000))
        larger.blob.size = 100_000
        with pytest.raises(grpc.aio.AioRpcError, match="has 400 bytes, not 100000"):
            await service.blobs.Write(iter([larger]), metadata=bearer("ads"))
        asked = blobs_pb2.QueryWriteRequest(blob=larger.blob)
        assert (await service.blobs.QueryWrite(asked, metadata=bearer("ads"))).committed_bytes == 0
        await service.put("ads", b"x" * 600)


def test_streams_of_one_blob_count_as_the_largest_announces_it() -> None:
    quota = StorageQuota(Quotas(general=Quota(stored_bytes=1000)))
    sizes = {size: CheckedBlob(sha256="a" * 64, size=size) for size in (900, 10)}
    other = CheckedBlob(sha256="b" * 64, size=200)
    with ExitStack() as streams:
        for size in (900, 10):
            streams.enter_context(quota.uploading("ads", sizes[size], held=0, unfinished={}))
        with pytest.raises(ServiceError) as caught:
            streams.enter_context(quota.uploading("ads", other, held=0, unfinished={}))
    assert caught.value.code is Code.QUOTA_EXCEEDED


@pytest.mark.slow
async def test_requests_in_flight_are_bounded(tmp_path: Path) -> None:
    async with guarded(tmp_path, "[quota]\nrequests_in_flight = 2") as service:
        job = await service.submit("ads", fresh=True)
        asked = jobs_pb2.WatchJobRequest(job_id=job.id)
        watching = [service.jobs.WatchJob(asked, metadata=bearer("ads")) for _ in range(2)]
        for each in watching:
            await each.read()
        again = service.jobs.GetCapabilities(jobs_pb2.GetCapabilitiesRequest(), metadata=bearer("ads"))
        assert await refused(again) == (FULL, "QUOTA_EXCEEDED", "requests_in_flight", 1.0)
        await service.submit("web", fresh=True)
        watching[0].cancel()
        async with asyncio.timeout(60):
            while True:
                try:
                    await service.jobs.ListPasses(jobs_pb2.ListPassesRequest(), metadata=bearer("ads"))
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
                else:
                    break


@pytest.mark.slow
async def test_queued_jobs_are_bounded_by_namespace(tmp_path: Path) -> None:
    async with guarded(tmp_path, "[namespaces.ads]\nqueued_jobs = 1") as service:
        await service.submit("ads", fresh=True)
        status, code, _, retry_s = await refused(service.submit("ads", fresh=True))
        assert (status, code) == (FULL, "QUEUE_FULL")
        assert retry_s > 0
        await service.submit("web", fresh=True)
        await service.submit("web", fresh=True)


@pytest.mark.slow
async def test_live_reports_are_bounded_by_namespace(tmp_path: Path) -> None:
    async with guarded(tmp_path, "[namespaces.ads]\nlive_reports_per_minute = 2") as service:

        async def report(who: str) -> None:  # of a job that there is not: that is told only within the quota
            asked = jobs_pb2.ReportLiveRequest(job_id="none", live=jobs_pb2.LiveFigures(qps_original=1.0))
            with pytest.raises(grpc.aio.AioRpcError, match="no job none"):
                await service.jobs.ReportLive(asked, metadata=bearer(who))

        asked = jobs_pb2.ReportLiveRequest(job_id="none")
        await report("ads")
        await report("ads")
        *said, retry_s = await refused(service.jobs.ReportLive(asked, metadata=bearer("ads")))
        assert said == [FULL, "QUOTA_EXCEEDED", "live_reports_per_minute"]
        assert 25.0 < retry_s <= 30.0
        for _ in range(5):
            await report("web")


async def test_live_reports_may_come_again_once_a_minute_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, refusals, quotas = 1_000.0, list[float | None](), Quotas()
    monkeypatch.setattr("fxlib_service.quotas.time.monotonic", lambda: now_s)
    for _ in range(40):  # four a second, of which 60 a minute fit beyond the first 60
        for _ in range(4):
            try:
                await quotas.live_report(None, "principal owner", Limits(live_reports_per_minute=60))
            except ServiceError as refusal:
                refusals.append(refusal.retry_after_s)
        now_s += 1.0
    assert 160 - len(refusals) == 60 + 39
    assert set(refusals) == {1.0}


@pytest.mark.slow
async def test_services_on_one_database_count_open_calls_and_live_reports_together(
    postgres: Postgres, tmp_path: Path
) -> None:
    url, text = postgres.url(), "[namespaces.ads]\nrequests_in_flight = 3\nlive_reports_per_minute = 2"
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    async with (
        asyncio.timeout(200),
        guarded(folders[0], text, database_url=url) as here,
        guarded(folders[1], text, database_url=url) as there,
    ):
        job = await here.submit("ads", fresh=True)
        asked = jobs_pb2.WatchJobRequest(job_id=job.id)
        watching = [each.jobs.WatchJob(asked, metadata=bearer("ads")) for each in (here, there, here)]
        for call in watching:
            await call.read()
        for each in (here, there):
            again = each.jobs.ListPasses(jobs_pb2.ListPassesRequest(), metadata=bearer("ads"))
            assert await refused(again) == (FULL, "QUOTA_EXCEEDED", "requests_in_flight", 1.0)
        await there.submit("web", fresh=True)
        watching[0].cancel()
        await admitted(there, "ads")

        live = jobs_pb2.ReportLiveRequest(job_id="none", live=jobs_pb2.LiveFigures(qps_original=1.0))
        for each in (here, there):
            with pytest.raises(grpc.aio.AioRpcError, match="no job none"):
                await admitted(each, "ads", live)
        for each in (here, there):
            *said, retry_s = await refused(admitted(each, "ads", live))
            assert said == [FULL, "QUOTA_EXCEEDED", "live_reports_per_minute"]
            assert 20.0 < retry_s <= 30.0
        with pytest.raises(grpc.aio.AioRpcError, match="no job none"):
            await there.jobs.ReportLive(live, metadata=bearer("web"))


async def admitted(service: Guarded, who: str, live: jobs_pb2.ReportLiveRequest | None = None) -> None:
    """Make a call again until no other one is in its way."""
    while True:
        try:
            if live is None:
                await service.jobs.ListPasses(jobs_pb2.ListPassesRequest(), metadata=bearer(who))
            else:
                await service.jobs.ReportLive(live, metadata=bearer(who))
        except grpc.aio.AioRpcError as error:
            if "requests_in_flight" not in str(error.details()):
                raise
            await asyncio.sleep(0.01)
        else:
            return


def test_calls_of_a_service_that_is_gone_count_no_longer(postgres: Postgres) -> None:
    url = postgres.url()
    here, there = PostgresJobStore(url), PostgresJobStore(url)
    assert here.count_calls("ads", 2, 3)
    assert [there.count_calls("ads", own, 3) for own in (2, 1)] == [False, True]
    here.tell_calls({"ads": 1})
    assert there.count_calls("ads", 2, 3)
    with here._write.begin() as db:
        silent = schema.calls_in_flight.c.service == here._origin
        db.execute(schema.calls_in_flight.update().where(silent).values(told_at=0.0))
    assert there.count_calls("ads", 3, 3)
    there.forget_counts()
    with here._write.begin() as db:
        assert db.execute(sa.select(schema.calls_in_flight.c.calls)).scalars().all() == [3]
    for each in (here, there):
        each.close()


def test_a_live_report_that_has_to_wait_is_told_for_how_long(postgres: Postgres) -> None:
    store = PostgresJobStore(postgres.url())
    assert [store.count_live_report("ads", 20.0, 60.0) for _ in range(3)] == [0.0] * 3
    assert 15.0 < store.count_live_report("ads", 20.0, 60.0) <= 20.0
    assert store.count_live_report("web", 20.0, 60.0) == 0.0
    store.close()


@pytest.mark.slow
async def test_a_trial_larger_than_the_quota_is_refused_by_its_fields(tmp_path: Path) -> None:
    async with guarded(tmp_path, "[quota]\ntrial_seconds = 90.5\ntrial_processes = 1") as service:
        await service.submit("ads", fresh=True)
        asked = request(fresh=True)
        asked.trial.budget_s = 91
        asked.workload.trainers = 2
        status, code, _, _ = await refused(service.jobs.Optimize(asked, metadata=bearer("ads")))
        assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


async def test_a_trial_that_says_nothing_asks_for_the_library_s_own_budget() -> None:
    async with make_service(limits=Limits(trial_s=59.0)) as core:
        with pytest.raises(ServiceError) as caught:
            await submit(core, request())
    assert fields(caught.value) == ["trial.budget_s"]


async def test_a_step_may_hang_no_longer_than_a_trial_may_take() -> None:
    asked = request()
    asked.trial.CopyFrom(trial_to_proto(TrialOptions(budget_s=60, step_timeout_s=91)))
    async with make_service(limits=Limits(trial_s=90.0)) as core:
        with pytest.raises(ServiceError) as caught:
            await submit(core, asked)
        assert fields(caught.value) == ["trial.step_timeout_s"]
        asked.trial.step_timeout_s = 90
        await submit(core, asked)


async def test_a_service_bounds_the_trials_of_everybody() -> None:
    asked = request()
    asked.trial.budget_s = 61
    asked.workload.trainers = 9
    async with make_service(limits=Limits(trial_s=60.0, trial_processes=8)) as core:
        with pytest.raises(ServiceError) as caught:
            await submit(core, asked)
    assert caught.value.code is Code.INVALID_REQUEST
    assert fields(caught.value) == ["trial.budget_s", "workload"]


def test_a_namespace_s_own_quota_changes_what_it_names(tmp_path: Path) -> None:
    text = "[quota]\nqueued_jobs = 5\nstored_bytes = 10\n[namespaces.ads]\nqueued_jobs = 50"
    quotas = Policy.read(write_policy(tmp_path, text)).quotas
    assert quotas.of("ads") == Quota(queued_jobs=50, stored_bytes=10)
    assert quotas.of("web") == Quota(queued_jobs=5, stored_bytes=10)
    assert quotas.of(None) == Quota()
    assert quotas.queued("ads", Limits(queued_per_namespace=20)) == 20


def test_without_quotas_nothing_is_bounded() -> None:
    assert Quotas().of("ads") == Quota()


@pytest.mark.parametrize(
    "text, says",
    [
        ("[quota]\nqueued = 1", "quota.queued: is not a known key"),
        ("[quota]\nqueued_jobs = 0", "quota.queued_jobs: must be a positive number"),
        ("[quota]\nqueued_jobs = 1.5", "quota.queued_jobs: must be a positive number"),
        ("[quota]\nqueued_jobs = true", "quota.queued_jobs: must be a positive number"),
        ("[quota]\ntrial_seconds = inf", "quota.trial_seconds: must be a positive number"),
        ("[namespaces.ads]\nstored_bytes = 'all'", "namespaces.ads.stored_bytes: must be a positive number"),
        ("[namespaces.'a b']\nstored_bytes = 1", "namespaces.a b: is not the name of a namespace"),
        ("namespaces = {ads = 1}", "namespaces.ads: must be a table"),
    ],
)
def test_a_quota_that_is_none_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(FxlibError) as caught:
        Policy.read(write_policy(tmp_path, text))
    assert says in str(caught.value)
