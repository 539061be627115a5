"""Requests at the door, without a network."""

import asyncio

import pytest

from fxlib.v1 import jobs_pb2
from fxlib_service.config import Limits
from fxlib_service.errors import Code, ServiceError
from tests.service.asking import profiled
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.memory_job_store import MemoryJobStore
from tests.service.support import (
    claim,
    get,
    graph_bytes,
    make_service,
    put,
    request,
    states,
    submit,
    work,
    worker,
)


async def test_an_accepted_job_is_queued() -> None:
    async with make_service() as core:
        job = await submit(core, request(labels={"team": "ads"}))
        assert states([job]) == ["queued"]
        assert (job.name, job.namespace, dict(job.labels)) == ("dlrm", "default", {"team": "ads"})
        assert await get(core, job.id) == job


async def test_the_same_request_again_is_the_same_job() -> None:
    async with make_service() as core:
        asked = request()
        copies = [jobs_pb2.OptimizeRequest.FromString(asked.SerializeToString()) for _ in range(4)]
        first = await submit(core, asked)
        assert {(await submit(core, copy)).id for copy in copies} == {first.id}


async def test_the_same_request_at_the_same_time_is_one_job() -> None:
    async with make_service() as core:
        asked = request().SerializeToString()
        jobs = await asyncio.gather(*(submit(core, jobs_pb2.OptimizeRequest.FromString(asked)) for _ in range(20)))
        assert len({job.id for job in jobs}) == 1


async def test_a_request_id_is_not_used_for_two_requests() -> None:
    async with make_service() as core:
        first = await submit(core, request(request_id="r1"))
        with pytest.raises(ServiceError) as caught:
            await submit(core, request(request_id="r1", name="other"))
        assert caught.value.code is Code.REQUEST_ID_REUSED
        assert caught.value.metadata == {"job_id": first.id}
        assert (await submit(core, request(request_id="r1", namespace="b"))).id != first.id


async def test_a_worker_is_given_the_profile() -> None:
    async with make_service() as core:
        asked = profiled()
        await submit(core, asked)
        lease = await claim(core)
        assert lease is not None
        assert lease.request.profile == asked.profile


async def test_a_namespace_s_queue_is_bounded() -> None:
    async with make_service(limits=Limits(queued_per_namespace=2)) as core:
        asked = request()
        first = await submit(core, asked)
        await submit(core)
        with pytest.raises(ServiceError) as caught:
            await submit(core)
        assert caught.value.code is Code.QUEUE_FULL
        assert caught.value.retry_after_s is not None
        assert (await submit(core, asked)).id == first.id
        assert states([await submit(core, request(namespace="b"))]) == ["queued"]


async def test_jobs_are_listed_page_by_page() -> None:
    async with make_service() as core:
        ids = [(await submit(core)).id for _ in range(5)]
        listed, token = [], ""
        while True:
            page = await core.optimizer.ListJobs(jobs_pb2.ListJobsRequest(page_size=2, page_token=token), None)
            listed += [job.id for job in page.jobs]
            token = page.next_page_token
            if not token:
                break
        assert listed == ids[::-1]


async def test_jobs_are_listed_oldest_first_where_that_is_asked_for() -> None:
    async with make_service() as core:
        ids = [(await submit(core)).id for _ in range(3)]
        asked = jobs_pb2.ListJobsRequest(page_size=2, oldest_first=True)
        page = await core.optimizer.ListJobs(asked, None)
        asked.page_token = page.next_page_token
        rest = await core.optimizer.ListJobs(asked, None)
        assert [job.id for job in (*page.jobs, *rest.jobs)] == ids


async def test_a_retried_job_is_measured_anew_once_for_each_request_id() -> None:
    async with make_service() as core:
        first = await submit(core, request(labels={"team": "ads"}))
        assert await work(core) == first.id
        again = jobs_pb2.RetryJobRequest(job_id=first.id, request_id="again")
        second = (await core.optimizer.RetryJob(again, None)).job
        repeated = (await core.optimizer.RetryJob(again, None)).job
        assert second.id == repeated.id != first.id
        assert (states([second]), second.cached, dict(second.labels)) == (["queued"], False, {"team": "ads"})
        assert await work(core) == second.id


async def test_a_retry_of_a_job_that_is_not_there_is_refused() -> None:
    async with make_service() as core:
        with pytest.raises(ServiceError) as caught:
            await core.optimizer.RetryJob(jobs_pb2.RetryJobRequest(job_id="nobody's", request_id="r"), None)
        assert caught.value.code is Code.JOB_NOT_FOUND


@pytest.mark.parametrize(
    "wanted",
    [
        jobs_pb2.ListJobsRequest(page_size=-1),
        jobs_pb2.ListJobsRequest(page_token="x"),
        jobs_pb2.ListJobsRequest(page_token="9" * 30),
        jobs_pb2.ListJobsRequest(id_prefix="%"),
        jobs_pb2.ListJobsRequest(states=[99]),  # type: ignore[list-item]
    ],
)
async def test_a_listing_that_makes_no_sense_is_refused(wanted: jobs_pb2.ListJobsRequest) -> None:
    async with make_service() as core:
        with pytest.raises(ServiceError):
            await core.optimizer.ListJobs(wanted, None)


async def test_cancelling_is_final_and_may_be_repeated() -> None:
    async with make_service() as core:
        job = await submit(core)
        for _ in range(2):
            cancelled = (await core.optimizer.CancelJob(jobs_pb2.CancelJobRequest(job_id=job.id), None)).job
            assert states([cancelled]) == ["cancelled"]
        assert await claim(core) is None


async def test_an_unknown_job_is_not_found() -> None:
    async with make_service() as core:
        for act in (
            core.optimizer.GetJob(jobs_pb2.GetJobRequest(job_id="none"), None),
            core.optimizer.CancelJob(jobs_pb2.CancelJobRequest(job_id="none"), None),
        ):
            with pytest.raises(ServiceError) as caught:
                await act
            assert caught.value.code is Code.JOB_NOT_FOUND


async def test_capabilities_name_the_live_workers() -> None:
    async with make_service() as core:
        await claim(core, worker("w1"))
        told = await core.optimizer.GetCapabilities(jobs_pb2.GetCapabilitiesRequest(), None)
        assert (list(told.torch_versions), list(told.workers)) == (["2.13.0"], [worker("w1")])
        assert "schedule" in told.recipes


async def test_passes_and_recipes_are_listed() -> None:
    async with make_service() as core:
        told = await core.optimizer.ListPasses(jobs_pb2.ListPassesRequest(), None)
        known = {each.name for each in told.passes}
        assert all(each.preserves in ("bitwise", "tolerance", "lossy") for each in told.passes)
        assert "schedule" in {recipe.name for recipe in told.recipes}
        assert {name for recipe in told.recipes for name in recipe.passes} <= known


@pytest.mark.slow
async def test_a_restarted_service_knows_its_jobs_and_answers() -> None:
    store, blobs = MemoryJobStore(), MemoryBlobStore()
    async with make_service(store, blobs) as core:
        done, waiting = await submit(core), await submit(core, request(torch_version="2.14.0"))
        await work(core)
    async with make_service(store, blobs) as core:
        assert states([await get(core, done.id), await get(core, waiting.id)]) == ["succeeded", "queued"]
        assert states([await submit(core)]) == ["succeeded"]
        await put(core, graph_bytes(5))
