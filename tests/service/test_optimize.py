"""Requests at the door, without a network."""

import asyncio
from collections.abc import Callable

import pytest

from fxlib.v1 import graph_pb2, jobs_pb2, workload_pb2
from service.blobs.memory import MemoryBlobStore
from service.config import Limits
from service.errors import Code, ServiceError
from service.leases import Lease
from service.stores.memory import MemoryJobStore
from tests.service.support import (
    answer,
    claim,
    complete,
    fields,
    get,
    graph_bytes,
    make_service,
    put,
    ref,
    request,
    states,
    submit,
    work,
    worker,
)

Change = Callable[[jobs_pb2.OptimizeRequest], object]


async def refusal(asked: jobs_pb2.OptimizeRequest, limits: Limits | None = None) -> ServiceError:
    async with make_service(limits=limits) as core:
        with pytest.raises(ServiceError) as caught:
            await submit(core, asked)
        assert (await core.optimizer.ListJobs(jobs_pb2.ListJobsRequest(), None)).jobs == []
        return caught.value


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


async def test_a_relaunch_is_answered_at_once_with_the_finished_job_s_result() -> None:
    async with make_service() as core:
        await submit(core)
        await work(core)
        again = await submit(core, request(name="relaunch"))
        assert (states([again]), again.cached, again.name) == (["succeeded"], True, "relaunch")
        assert again.result == answer()


async def test_a_fresh_request_is_not_answered_from_the_cache() -> None:
    async with make_service() as core:
        await submit(core)
        await work(core)
        assert states([await submit(core, request(fresh=True))]) == ["queued"]


@pytest.mark.parametrize(
    "change",
    [
        lambda asked: asked.graph.CopyFrom(ref(graph_bytes(3))),
        lambda asked: asked.workload.MergeFrom(workload_pb2.Workload(threads=2)),
        lambda asked: asked.trial.MergeFrom(
            jobs_pb2.TrialOptions(min_gain=0.1, confidence=0.9, budget_s=9, sameness_steps=3, step_timeout_s=9)
        ),
        lambda asked: asked.MergeFrom(jobs_pb2.OptimizeRequest(torch_version="2.14.0")),
    ],
    ids=["graph", "workload", "trial", "torch"],
)
async def test_another_request_is_not_answered_from_the_cache(change: Change) -> None:
    async with make_service(graphs=[graph_bytes(3)]) as core:
        await submit(core)
        await work(core)
        asked = request()
        change(asked)
        assert states([await submit(core, asked)]) == ["queued"]


async def test_an_answer_holds_only_for_the_hardware_that_it_was_measured_on() -> None:
    async with make_service() as core:
        await submit(core)
        await work(core, who=worker("w1", hardware="cpu-a"))
        core.optimizer._fleet._workers.clear()
        await claim(core, worker("w2", hardware="cpu-b"))
        assert states([await submit(core)]) == ["queued"]
        await claim(core, worker("w1", hardware="cpu-a"), wait_s=0)
        assert states([await submit(core)]) == ["succeeded"]


async def test_an_answer_that_lay_in_the_moment_is_not_handed_on() -> None:
    async with make_service() as core:
        await submit(core)
        await work(core, answer(reason="TRIAL_DIED"))
        assert states([await submit(core)]) == ["queued"]


async def test_equal_jobs_at_the_same_time_are_worked_on_once_and_all_end() -> None:
    async with make_service() as core:
        jobs = [await submit(core) for _ in range(5)]
        lease = await claim(core)
        assert lease is not None
        assert await claim(core, worker("w2")) is None
        await complete(core, lease)
        await core.ledger._background.end()
        ended = [await get(core, job.id) for job in jobs]
        assert states(ended) == ["succeeded"] * 5
        assert [job.cached for job in ended] == [False, True, True, True, True]
        assert all(job.result == answer() for job in ended)


@pytest.mark.parametrize("reason", ["TRIAL_HUNG", "TRIAL_DIED", "OUT_OF_MEMORY", "NO_SERVER"])
async def test_jobs_that_asked_at_the_same_time_share_even_an_answer_that_lay_in_the_moment(reason: str) -> None:
    async with make_service() as core:
        jobs = [await submit(core) for _ in range(3)]
        await work(core, answer(reason=reason))
        await core.ledger._background.end()
        ended = [await get(core, job.id) for job in jobs]
        assert [job.result.reason_code for job in ended] == [reason] * 3
        assert states([await submit(core)]) == ["queued"]


async def test_a_job_that_ends_its_workers_does_not_do_so_again_for_each_of_its_equals() -> None:
    async with make_service() as core:
        jobs = [await submit(core) for _ in range(3)]
        for _ in range(3):
            lease = await claim(core)
            assert lease is not None
            core.dispatcher.leases.end(lease.job_id)
            await core.dispatcher.expire([Lease(job_id=lease.job_id, token=lease.token, worker_id="w1")])
        await core.ledger._background.end()
        ended = [await get(core, job.id) for job in jobs]
        assert states(ended) == ["failed"] * 3
        assert {job.failure.code for job in ended} == {"WORKER_LOST"}


async def test_an_equal_job_is_claimed_when_the_running_one_ends_without_an_answer() -> None:
    async with make_service() as core:
        first, second = await submit(core), await submit(core)
        await claim(core)
        waiting = asyncio.create_task(claim(core, worker("w2"), wait_s=5))
        await asyncio.sleep(0.05)
        await core.optimizer.CancelJob(jobs_pb2.CancelJobRequest(job_id=first.id), None)
        lease = await waiting
        assert lease is not None
        assert lease.job_id == second.id


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


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda asked: asked.ClearField("request_id"), "request_id"),
        (lambda asked: setattr(asked, "request_id", "x" * 129), "request_id"),
        (lambda asked: setattr(asked, "name", "a\nb"), "name"),
        (lambda asked: setattr(asked, "name", "x" * 257), "name"),
        (lambda asked: setattr(asked, "namespace", "../etc"), "namespace"),
        (lambda asked: setattr(asked, "torch_version", ""), "torch_version"),
        (lambda asked: setattr(asked, "torch_version", "2.13; rm -rf /"), "torch_version"),
        (lambda asked: asked.labels.update({"a b": "c"}), "labels['a b']"),
        (lambda asked: asked.labels.update({f"l{i}": "" for i in range(33)}), "labels"),
        (lambda asked: asked.ClearField("graph"), "graph"),
        (lambda asked: setattr(asked.graph, "sha256", "../../etc/passwd"), "graph.sha256"),
        (lambda asked: setattr(asked.recipe, "name", "no-such-recipe"), "recipe"),
        (lambda asked: asked.recipe.passes.add(name="no_such_pass"), "recipe"),
        (lambda asked: setattr(asked.workload.loss, "name", "no-such-loss"), "workload"),
        (lambda asked: asked.workload.ClearField("description"), "workload"),
        (lambda asked: setattr(asked.workload, "mode", 77), "workload"),
        (lambda asked: setattr(asked.workload, "threads", 0), "workload"),
        (lambda asked: setattr(asked.workload.optimizer, "lr", float("nan")), "workload"),
        (lambda asked: setattr(asked.trial, "budget_s", -1.0), "trial"),
    ],
)
async def test_a_field_that_is_not_valid_is_named(change: Change, field: str) -> None:
    asked = request()
    change(asked)
    error = await refusal(asked)
    assert error.code is Code.INVALID_REQUEST
    assert any(each.startswith(field) for each in fields(error)), fields(error)


async def test_all_fields_at_fault_are_named_at_once() -> None:
    asked = request(request_id="", name="\n", namespace=".")
    assert fields(await refusal(asked)) == ["request_id", "name", "namespace"]


async def test_a_graph_that_was_not_uploaded_is_missing() -> None:
    error = await refusal(request(graph=b"never sent"))
    assert error.code is Code.BLOB_MISSING
    assert fields(error) == ["graph"]


async def test_batches_that_were_not_uploaded_are_missing() -> None:
    asked = request()
    asked.workload.batches.batches.append(ref(b"never sent"))
    error = await refusal(asked)
    assert error.code is Code.BLOB_MISSING
    assert fields(error) == ["workload.blobs[0]"]


@pytest.mark.parametrize("data", [b"", b"not a graph", b"\x80\x04\x95pickle", b"\xff" * 1000])
async def test_bytes_that_are_no_graph_are_refused(data: bytes) -> None:
    async with make_service(graphs=[data]) as core:
        with pytest.raises(ServiceError) as caught:
            await submit(core, request(graph=data))
    assert caught.value.code is Code.INVALID_GRAPH
    assert fields(caught.value)[0].startswith("graph")


async def test_a_graph_of_a_later_format_is_refused() -> None:
    graph = graph_pb2.Graph.FromString(graph_bytes())
    graph.format = 99
    async with make_service(graphs=[graph.SerializeToString()]) as core:
        with pytest.raises(ServiceError) as caught:
            await submit(core, request(graph=graph.SerializeToString()))
    assert caught.value.code is Code.INVALID_GRAPH


async def test_a_graph_that_is_too_large_is_not_even_read() -> None:
    assert (await refusal(request(), Limits(graph_bytes=10))).code is Code.INVALID_GRAPH


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


@pytest.mark.parametrize(
    "wanted",
    [
        jobs_pb2.ListJobsRequest(page_size=-1),
        jobs_pb2.ListJobsRequest(page_token="x"),
        jobs_pb2.ListJobsRequest(page_token="9" * 30),
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


async def test_a_restarted_service_knows_its_jobs_and_answers() -> None:
    store, blobs = MemoryJobStore(), MemoryBlobStore()
    async with make_service(store, blobs) as core:
        done, waiting = await submit(core), await submit(core, request(torch_version="2.14.0"))
        await work(core)
    async with make_service(store, blobs) as core:
        assert states([await get(core, done.id), await get(core, waiting.id)]) == ["succeeded", "queued"]
        assert states([await submit(core)]) == ["succeeded"]
        await put(core, graph_bytes(5))
