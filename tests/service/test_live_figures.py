"""What launchers report of their own steps, and what the service makes of it."""

import math

import pytest

from fxlib.v1 import jobs_pb2
from fxlib_service.core import Core
from fxlib_service.errors import Code, ServiceError
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.memory_job_store import MemoryJobStore
from tests.service.support import make_service, request, submit, work
from tests.service.test_metrics import samples
from tests.service.test_watch import history, watch


def figures(gain: float = 0.4, *, went_back: bool = False) -> jobs_pb2.LiveFigures:
    estimate = jobs_pb2.Estimate(value=gain, low=gain - 0.1, high=gain + 0.1)
    return jobs_pb2.LiveFigures(qps_original=100, qps_optimized=140, gain=estimate, steps=1000, went_back=went_back)


async def report(core: Core, job_id: str, live: jobs_pb2.LiveFigures) -> None:
    await core.optimizer.ReportLive(jobs_pb2.ReportLiveRequest(job_id=job_id, live=live), None)


async def get(core: Core, job_id: str) -> jobs_pb2.Job:
    return (await core.optimizer.GetJob(jobs_pb2.GetJobRequest(job_id=job_id), None)).job


async def answered(core: Core) -> str:
    job = await submit(core)
    await work(core)
    return job.id


async def test_the_last_report_stands_beside_what_the_trial_measured() -> None:
    async with make_service() as core:
        job_id = await answered(core)
        await report(core, job_id, figures(0.3))
        await report(core, job_id, figures(0.4))
        [listed] = (await core.optimizer.ListJobs(jobs_pb2.ListJobsRequest(), None)).jobs
        for job in (await get(core, job_id), listed):
            assert (job.result.gain.value, job.live.gain.value, job.live.steps) == (0.5, 0.4, 1000)
            assert job.live.HasField("at")
            assert job.last_sequence == 3
        found = samples(core)
        assert found['fxlib_model_live_gain_ratio{bound="value",fxlib_namespace="default",model="dlrm"}'] == 0.4
        assert found['fxlib_model_live_qps{arm="optimized",fxlib_namespace="default",model="dlrm"}'] == 140
        assert found["fxlib_jobs_went_back_total"] == 0


async def test_a_way_back_is_one_event_after_the_end_and_is_counted_once() -> None:
    async with make_service() as core:
        job_id = await answered(core)
        await report(core, job_id, figures(-0.2, went_back=True))
        await report(core, job_id, figures(-0.2, went_back=True))
        told = [event async for event in watch(core, job_id)]
        assert [event.phase for event in told] == ["queued", "rewrite", "done", "went_back"]
        assert "fell below its promise: -20.0% [-30.0%, -10.0%]" in told[-1].message
        assert await history(core, job_id, 3) == [4]
        found = samples(core)
        assert found["fxlib_jobs_went_back_total"] == 1
        assert found['fxlib_jobs_finished_total{state="succeeded"}'] == 1
        assert (await get(core, job_id)).state == jobs_pb2.JOB_STATE_SUCCEEDED


async def test_a_job_without_an_answer_has_no_training_to_tell_of() -> None:
    async with make_service() as core:
        job = await submit(core)
        with pytest.raises(ServiceError, match="it has no answer to train with") as caught:
            await report(core, job.id, figures())
        assert caught.value.code is Code.INVALID_REQUEST


@pytest.mark.parametrize(
    "live",
    [
        jobs_pb2.LiveFigures(qps_original=-1),
        jobs_pb2.LiveFigures(qps_optimized=math.inf),
        jobs_pb2.LiveFigures(qps_original=math.nan),
        jobs_pb2.LiveFigures(qps_original=1e308),
        jobs_pb2.LiveFigures(gain=jobs_pb2.Estimate(value=1.0, low=0.0, high=1e308)),
        jobs_pb2.LiveFigures(gain=jobs_pb2.Estimate(value=math.nan)),
        jobs_pb2.LiveFigures(gain=jobs_pb2.Estimate(value=0.5, low=0.6, high=0.7)),
        jobs_pb2.LiveFigures(gain=jobs_pb2.Estimate(value=-2, low=-3, high=0)),
        jobs_pb2.LiveFigures.FromString(b"\xfa\x7f\xd0\x0f" + b"x" * 2_000),  # a field of no release
    ],
)
async def test_figures_that_make_no_sense_are_refused(live: jobs_pb2.LiveFigures) -> None:
    async with make_service() as core:
        job_id = await answered(core)
        with pytest.raises(ServiceError) as caught:
            await report(core, job_id, live)
        assert caught.value.code is Code.INVALID_REQUEST
        assert not (await get(core, job_id)).HasField("live")


async def test_figures_outlast_a_restart() -> None:
    store, blobs = MemoryJobStore(), MemoryBlobStore()
    async with make_service(store=store, blobs=blobs) as core:
        await report(core, await answered(core), figures())
    async with make_service(store=store, blobs=blobs) as core:
        found = samples(core)
        assert found[
            'fxlib_model_live_gain_ratio{bound="low",fxlib_namespace="default",model="dlrm"}'
        ] == pytest.approx(0.3)


LIVE_GAIN = 'fxlib_model_live_gain_ratio{bound="value",fxlib_namespace="default",model="dlrm"}'


@pytest.mark.parametrize("first_reports", [False, True])
async def test_figures_of_a_launcher_whose_answer_was_cached_outlast_a_restart(first_reports: bool) -> None:
    store, blobs = MemoryJobStore(), MemoryBlobStore()
    async with make_service(store=store, blobs=blobs) as core:
        first, again = await answered(core), await submit(core)
        assert again.cached
        if first_reports:
            await report(core, first, figures(0.4))
        await report(core, again.id, figures(-0.2))
    async with make_service(store=store, blobs=blobs) as core:
        assert samples(core)[LIVE_GAIN] == -0.2


async def test_the_last_report_outlasts_a_restart_though_its_job_is_the_older_one() -> None:
    store, blobs = MemoryJobStore(), MemoryBlobStore()
    async with make_service(store=store, blobs=blobs) as core:
        older, newer = await answered(core), await submit(core, request(fresh=True))
        await work(core)
        await report(core, newer.id, figures(0.1))
        await report(core, older, figures(0.4))
    async with make_service(store=store, blobs=blobs) as core:
        assert samples(core)[LIVE_GAIN] == 0.4
