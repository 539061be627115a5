"""Workers and their leases, without a network."""

import asyncio
from math import inf, nan

import pytest

from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_service.dispatch import Wakeups
from fxlib_service.errors import Code, ServiceError
from tests.service.leasing import leased, report
from tests.service.support import (
    answer,
    claim,
    complete,
    fields,
    get,
    make_service,
    ref,
    request,
    states,
    submit,
    work,
    worker,
)


def adopting(graph: bytes | None) -> jobs_pb2.JobResult:
    gain = jobs_pb2.Estimate(value=0.5, low=0.4, high=0.6)
    return jobs_pb2.JobResult(
        decision=jobs_pb2.DECISION_ADOPT, gain=gain, graph=None if graph is None else ref(graph), preserves="bitwise"
    )


def figures(name: str, value: float, low: float, high: float) -> jobs_pb2.JobResult:
    """The usual answer with another figure."""
    changed = answer()
    getattr(changed, name).CopyFrom(jobs_pb2.Estimate(value=value, low=low, high=high))
    return changed


STOLEN = jobs_pb2.JobResult(
    decision=jobs_pb2.DECISION_KEEP_ORIGINAL, calls=[jobs_pb2.CallReport(node="n", action="stolen")]
)


async def test_a_worker_claims_a_job_with_its_request() -> None:
    async with make_service() as core:
        asked = request()
        job = await submit(core, asked)
        lease = await leased(core)
        assert (lease.job_id, lease.attempt, lease.duration_s) == (job.id, 1, 30.0)
        assert lease.request.graph == asked.graph
        assert lease.request.trial.budget_s > 0
        running = await get(core, job.id)
        assert (states([running]), running.worker_id, running.phase) == (["running"], "w1", "rewrite")


async def test_a_job_goes_only_to_workers_of_its_torch_version() -> None:
    async with make_service() as core:
        await submit(core)
        assert await claim(core, worker(torch_version="2.14.0")) is None
        assert await claim(core, worker()) is not None


async def test_a_job_goes_only_to_workers_that_have_the_labels_it_asks_for() -> None:
    async with make_service() as core:
        gpu, cpu = worker("gpu", labels={"hardware": "h200", "rack": "3"}), worker("cpu", labels={"hardware": "epyc"})
        picky = await submit(core, request(fresh=True, where={"hardware": "h200"}))
        easy = await submit(core, request(fresh=True))
        assert [(await leased(core, each)).job_id for each in (cpu, gpu)] == [easy.id, picky.id]
        await submit(core, request(fresh=True, where={"hardware": "h200", "rack": "4"}))
        assert await claim(core, gpu) is None
        assert await claim(core, worker("of an earlier release")) is None


async def test_a_job_wakes_a_waiting_worker_that_may_run_it() -> None:
    async with make_service() as core:
        others = [asyncio.create_task(claim(core, worker(f"w{i}"), wait_s=600)) for i in range(3)]
        fitting = asyncio.create_task(claim(core, worker("gpu", labels={"hardware": "h200"}), wait_s=600))
        await asyncio.sleep(0.05)
        job = await submit(core, request(where={"hardware": "h200"}))
        lease = await fitting
        assert lease is not None
        assert lease.job_id == job.id
        core.dispatcher.close()
        assert await asyncio.gather(*others) == [None] * 3


async def test_a_job_that_no_live_worker_could_take_says_so_until_one_could() -> None:
    async with make_service() as core:
        await claim(core, worker("cpu", labels={"hardware": "epyc"}))
        job = await submit(core, request(where={"hardware": "h200"}))
        assert job.waits_for == "no live worker has hardware=h200 yet; there are hardware=epyc"
        assert (await get(core, job.id)).where == {"hardware": "h200"}
        assert core.registry.get_sample_value("fxlib_queue_without_worker") == 1
        gpu = worker("gpu", labels={"hardware": "h200"})
        assert (await leased(core, gpu)).job_id == job.id
        later = await submit(core, request(fresh=True, where={"hardware": "h200"}))
        assert later.waits_for == ""
        assert core.registry.get_sample_value("fxlib_queue_without_worker") == 0


async def test_an_answer_is_for_those_who_ask_for_the_same_labels() -> None:
    async with make_service() as core:
        gpu = worker("gpu", labels={"hardware": "h200"})
        await submit(core, request(where={"hardware": "h200"}))
        await work(core, who=gpu)
        assert (await submit(core, request(where={"hardware": "h200"}))).cached
        assert not (await submit(core, request())).cached


@pytest.mark.parametrize(
    "labels, field",
    [
        ({"hardware": "a\x1b[2J"}, "['hardware']"),
        ({"hardware": "x" * 257}, "['hardware']"),
        ({"a b": "c"}, "['a b']"),
        ({f"k{i}": "v" for i in range(5_000)}, ""),
    ],
)
async def test_labels_that_nobody_should_have_are_refused(labels: dict[str, str], field: str) -> None:
    async with make_service() as core:
        with pytest.raises(ServiceError) as refused:
            await claim(core, worker(labels=labels))
        assert fields(refused.value) == [f"worker.labels{field}"]
        with pytest.raises(ServiceError) as refused:
            await submit(core, request(where=labels))
        assert fields(refused.value) == [f"where{field}"]


async def test_jobs_of_one_namespace_go_in_order() -> None:
    async with make_service() as core:
        jobs = [await submit(core, request(fresh=True)) for _ in range(4)]
        assert [(await leased(core)).job_id for _ in jobs] == [job.id for job in jobs]


async def test_a_namespace_with_a_long_queue_holds_up_no_other() -> None:
    async with make_service() as core:
        for _ in range(10):
            await submit(core, request(namespace="busy", fresh=True))
        await submit(core, request(namespace="quiet", fresh=True))
        await submit(core, request(namespace="quiet", fresh=True))
        order = []
        for _ in range(5):
            lease = await leased(core)
            order.append(lease.request.namespace)
            await complete(core, lease)
        assert order == ["busy", "quiet", "busy", "quiet", "busy"]


async def test_a_waiting_worker_is_woken_by_a_new_job() -> None:
    async with make_service() as core:
        waiting = asyncio.create_task(claim(core, wait_s=600))
        await asyncio.sleep(0.05)
        job = await submit(core)
        lease = await waiting
        assert lease is not None
        assert lease.job_id == job.id


async def test_many_waiting_workers_share_what_comes() -> None:
    async with make_service() as core:
        waiting = [asyncio.create_task(claim(core, worker(f"w{i}"), wait_s=600)) for i in range(20)]
        await asyncio.sleep(0.05)
        jobs = [await submit(core, request(fresh=True)) for _ in range(12)]
        leases = [await next_ for _, next_ in zip(jobs, asyncio.as_completed(waiting), strict=False)]
        assert sorted(lease.job_id for lease in leases if lease is not None) == sorted(job.id for job in jobs)
        assert sum(each.done() for each in waiting) == 12
        core.dispatcher.close()
        assert [lease for lease in await asyncio.gather(*waiting) if lease not in leases] == [None] * 8


async def test_a_worker_that_left_takes_no_job_with_it() -> None:
    async with make_service() as core:
        for delay in (0.0, 0.001, 0.003, 0.01, 0.05):
            gone = asyncio.create_task(claim(core, worker("gone"), wait_s=10))
            await asyncio.sleep(delay / 2)
            job = await submit(core, request(fresh=True))
            gone.cancel()
            await asyncio.wait([gone])
            await core.ledger._background.end()
            if gone.cancelled():
                lease = await claim(core, wait_s=60)
                assert lease is not None
                assert (lease.job_id, lease.attempt) == (job.id, 1)


async def test_a_call_to_a_bell_is_not_lost_with_the_one_it_woke() -> None:
    async with make_service() as core:
        first = asyncio.create_task(claim(core, worker("w1"), wait_s=600))
        second = asyncio.create_task(claim(core, worker("w2"), wait_s=600))
        await asyncio.sleep(0.05)
        core.dispatcher._wakeups["2.13.0"].wake_one({})
        first.cancel()
        job = await submit(core)
        lease = await second
        assert lease is not None
        assert lease.job_id == job.id


async def test_versions_of_torch_that_no_worker_waits_for_are_not_remembered() -> None:
    async with make_service() as core:
        for number in range(3):
            job = await submit(core, request(torch_version=f"2.13.{number}+mine"))
            await core.optimizer.CancelJob(jobs_pb2.CancelJobRequest(job_id=job.id), None)
            assert await claim(core, worker(torch_version=f"3.{number}"), wait_s=0.0) is None
        assert core.dispatcher._wakeups == {}
        waiting = asyncio.create_task(claim(core, worker(), wait_s=600))
        await asyncio.sleep(0.05)
        assert await claim(core, worker("w2"), wait_s=0.0) is None
        job = await submit(core)
        lease = await waiting
        assert lease is not None
        assert (lease.job_id, core.dispatcher._wakeups) == (job.id, {})


async def test_who_was_woken_and_has_not_looked_keeps_the_others_of_its_version_together() -> None:
    wakeups = Wakeups()
    with wakeups.waiting({}):
        wakeups.wake_one({})
        assert not wakeups.idle
        with wakeups.waiting({}) as second:
            pass
        assert not second.woken.done()
        assert not wakeups.idle
    assert wakeups.idle


async def test_completing_twice_is_completing_once() -> None:
    async with make_service() as core:
        job = await submit(core)
        lease = await leased(core)
        await asyncio.gather(*(complete(core, lease) for _ in range(5)))
        ended = await get(core, job.id)
        assert (states([ended]), ended.result, ended.last_sequence) == (["succeeded"], answer(), 3)


async def test_another_answer_after_the_first_is_refused() -> None:
    async with make_service() as core:
        await submit(core)
        lease = await leased(core)
        await complete(core, lease)
        with pytest.raises(ServiceError, match="another answer") as caught:
            await complete(core, lease, answer(gain=0.6))
        assert caught.value.code is Code.LEASE_LOST


async def test_what_a_worker_tells_is_one_plain_line() -> None:
    async with make_service() as core:
        job = await submit(core)
        lease = await leased(core)
        failure = jobs_pb2.JobFailure(code="REWRITE_FAILED", message="\x1b[2Jgone\nfxlib: done")
        outcome = workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token, failure=failure)
        await core.workers.Complete(outcome, None)
        assert (await get(core, job.id)).failure.message == " [2Jgone fxlib: done"


async def test_what_a_worker_writes_beside_the_figures_does_not_swell_a_listing() -> None:
    async with make_service() as core:
        job = await submit(core)
        lease = await leased(core)
        result, unknown = answer(), jobs_pb2.JobResult(reason="x" * 50_000).SerializeToString()
        result.reason = "why\n" * 50_000
        result.MergeFromString(b"\xfa\x7f" + unknown[1:])  # a field that this release does not know
        await complete(core, lease, result)
        [listed] = (await core.optimizer.ListJobs(jobs_pb2.ListJobsRequest(), None)).jobs
        assert (listed.id, listed.result.gain.value, len(listed.result.reason)) == (job.id, 0.5, 4000)
        assert listed.ByteSize() < 5_000
        assert (await get(core, job.id)).ByteSize() > 50_000  # a later release reads it


async def test_a_worker_s_failure_is_the_job_s() -> None:
    async with make_service() as core:
        job = await submit(core)
        lease = await leased(core)
        failure = jobs_pb2.JobFailure(code="REWRITE_FAILED", message="why " * 5000)
        await core.workers.Complete(
            workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token, failure=failure), None
        )
        ended = await get(core, job.id)
        assert (states([ended]), ended.failure.code) == (["failed"], "REWRITE_FAILED")
        assert len(ended.failure.message) == 4000


@pytest.mark.parametrize(
    "result, code, field",
    [
        (jobs_pb2.JobResult(), Code.INVALID_REQUEST, "result"),
        (adopting(None), Code.INVALID_REQUEST, "result.graph"),
        (adopting(b"absent"), Code.BLOB_MISSING, "result.graph"),
        (adopting(b"no graph"), Code.INVALID_GRAPH, "result.graph"),
        (jobs_pb2.JobResult(decision=jobs_pb2.DECISION_ADOPT), Code.INVALID_REQUEST, "result: JobResult.gain"),
        (figures("gain", 0.03, 0.01, 0.05), Code.INVALID_REQUEST, "result: JobResult.gain"),
        (figures("gain", 0.5, 0.4, inf), Code.INVALID_REQUEST, "result: JobResult.gain"),
        (figures("gain", 0.5, 0.6, 0.7), Code.INVALID_REQUEST, "result: JobResult.gain"),
        (figures("gain", nan, nan, nan), Code.INVALID_REQUEST, "result: JobResult.gain"),
        (figures("qps_original", -5, -6, -4), Code.INVALID_REQUEST, "result: JobResult.qps_original"),
        (figures("qps_optimized", inf, 1, inf), Code.INVALID_REQUEST, "result: JobResult.qps_optimized"),
        (STOLEN, Code.INVALID_REQUEST, "result"),
        (jobs_pb2.JobResult(decision=jobs_pb2.DECISION_KEEP_ORIGINAL, reason_code="X" * 65), Code.INVALID_REQUEST, ""),
    ],
)
async def test_an_answer_that_makes_no_sense_is_refused_and_the_job_goes_on(
    result: jobs_pb2.JobResult, code: Code, field: str
) -> None:
    async with make_service(graphs=[b"no graph"]) as core:
        await submit(core)
        lease = await leased(core)
        with pytest.raises(ServiceError) as caught:
            await complete(core, lease, result)
        assert caught.value.code is code
        assert fields(caught.value)[0].startswith(field)
        await complete(core, lease)


async def test_an_outcome_is_needed() -> None:
    async with make_service() as core:
        with pytest.raises(ServiceError, match="outcome"):
            await core.workers.Complete(workers_pb2.CompleteRequest(job_id="j", token="t"), None)


@pytest.mark.parametrize(
    "asked, field",
    [
        (workers_pb2.ClaimRequest(), "worker.worker_id"),
        (workers_pb2.ClaimRequest(worker=worker("a\nb")), "worker.worker_id"),
        (workers_pb2.ClaimRequest(worker=worker(torch_version="")), "worker.torch_version"),
        (workers_pb2.ClaimRequest(worker=worker(hardware="x" * 5000)), "worker.hardware"),
        (workers_pb2.ClaimRequest(worker=worker(containment="\x1b[1m")), "worker.containment"),
        (workers_pb2.ClaimRequest(worker=worker(), wait_s=float("nan")), "wait_s"),
        (workers_pb2.ClaimRequest(worker=worker(), wait_s=-1), "wait_s"),
    ],
)
async def test_a_claim_that_makes_no_sense_is_refused(asked: workers_pb2.ClaimRequest, field: str) -> None:
    async with make_service() as core:
        with pytest.raises(ServiceError) as caught:
            await core.workers.Claim(asked, None)
        assert field in fields(caught.value)


@pytest.mark.parametrize("phase, progress", [("", 0.5), ("x" * 99, 0.5), ("qps", float("nan")), ("qps", 2.0)])
async def test_a_report_that_makes_no_sense_is_refused(phase: str, progress: float) -> None:
    async with make_service() as core:
        await submit(core)
        lease = await leased(core)
        with pytest.raises(ServiceError):
            await report(core, lease, phase, progress)
