"""Which requests are answered with what another job found, and which are not."""

import asyncio
from typing import Any

import pytest
import torch

import fxlib
from fxlib.protocol import workload_to_proto
from fxlib.v1 import jobs_pb2, workload_pb2
from fxlib_service.content_checks import cache_key
from fxlib_service.errors import ServiceError
from fxlib_service.leases import Lease
from fxlib_service.lifecycle import Transition
from tests.service.asking import Change, profiled
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.support import (
    answer,
    claim,
    complete,
    get,
    graph_bytes,
    make_service,
    ref,
    request,
    states,
    submit,
    work,
    worker,
)

pytestmark = pytest.mark.slow


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
        lambda asked: asked.MergeFrom(jobs_pb2.OptimizeRequest(diffs=True)),
    ],
    ids=["graph", "workload", "trial", "torch", "diffs"],
)
async def test_another_request_is_not_answered_from_the_cache(change: Change) -> None:
    async with make_service(graphs=[graph_bytes(3)]) as core:
        await submit(core)
        await work(core)
        asked = request()
        change(asked)
        assert states([await submit(core, asked)]) == ["queued"]


async def test_two_profiles_of_one_program_share_an_answer_and_of_two_programs_do_not() -> None:
    async with make_service() as core:
        await submit(core, profiled())
        await work(core)
        assert states([await submit(core, profiled(service_s=0.003))]) == ["succeeded"]
        assert states([await submit(core, profiled(function="my.ps:other"))]) == ["queued"]
        assert states([await submit(core)]) == ["queued"]


async def test_an_answer_holds_only_for_the_hardware_that_it_was_measured_on() -> None:
    async with make_service() as core:
        await submit(core)
        await work(core, who=worker("w1", hardware="cpu-a"))
        core.optimizer._workers._workers.clear()
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


async def test_a_worker_that_asks_before_equal_jobs_were_ended_gets_none_of_them() -> None:
    async with make_service() as core:
        core.ledger.listeners.remove(next(each for each in core.ledger.listeners if "EqualJobs" in repr(each)))
        jobs = [await submit(core) for _ in range(3)]  # as at a service that is killed before it ends the other two
        await work(core)
        assert await claim(core) is None
        ended = [await get(core, job.id) for job in jobs]
        assert [job.cached for job in ended] == [False, True, True]
        assert all(job.result == answer() for job in ended)
        fresh = await submit(core, request(fresh=True))
        lease = await claim(core)
        assert lease is not None
        assert lease.job_id == fresh.id


@pytest.mark.parametrize("killed", [True, False])
async def test_an_answer_whose_graph_was_lost_ends_no_equal_job_and_keeps_none_from_a_worker(
    killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    blobs = MemoryBlobStore()
    async with make_service(blobs=blobs, graphs=[graph_bytes(3), graph_bytes(4)]) as core:
        core.dispatcher._equal._holdings.kept = True
        core.ledger.listeners.remove(core.dispatcher._equal.heard)
        first, equal = await submit(core), await submit(core)
        other = await submit(core, request(graph=graph_bytes(4)))
        result = answer()
        result.graph.CopyFrom(ref(graph_bytes(3)))
        await work(core, result)
        assert blobs.delete(result.graph.sha256, older_than_s=0.0)
        done = core.ledger.store.get(first.id)
        assert done is not None
        if not killed:
            core.dispatcher._equal.heard(Transition(job=done, result=core.ledger.store.result_of(first.id)))
            await core.ledger._background.end()
        leases = [await claim(core), await claim(core)]
        assert [lease and lease.job_id for lease in leases] == [equal.id, other.id]
        assert {each.levelname for each in caplog.records} == {"WARNING"}
        assert f"job {equal.id} does not get the answer of job {first.id}: " in caplog.text


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
        waiting = asyncio.create_task(claim(core, worker("w2"), wait_s=60))
        await asyncio.sleep(0.05)
        await core.optimizer.CancelJob(jobs_pb2.CancelJobRequest(job_id=first.id), None)
        lease = await waiting
        assert lease is not None
        assert lease.job_id == second.id


def with_variant(name: str = "evaluation", width: int = 3) -> jobs_pb2.OptimizeRequest:
    """Return the usual request with a variant of its step, which has a graph of its own."""
    asked = request()
    asked.variants.add(name=name, graph=ref(graph_bytes(width)), workload=asked.workload)
    return asked


async def test_variants_are_part_of_what_is_asked_and_of_what_is_answered() -> None:
    async with make_service(graphs=(graph_bytes(3), graph_bytes(4))) as core:
        await submit(core)
        await work(core)
        assert states([await submit(core, with_variant())]) == ["queued"]
        result = answer()
        result.variants.add(name="evaluation").result.CopyFrom(answer(gain=1.0))
        await work(core, result)
        again = await submit(core, with_variant())
        assert (states([again]), again.result.variants[0].result.gain.value) == (["succeeded"], 1.0)
        for other in (with_variant(width=4), with_variant(name="other")):
            assert states([await submit(core, other)]) == ["queued"]


async def test_variants_run_on_the_servers_of_the_request_and_have_names_of_their_own() -> None:
    async with make_service(graphs=(graph_bytes(3),)) as core:
        asked = with_variant()
        asked.variants[0].workload.servers.add(name="another")
        with pytest.raises(ServiceError, match="servers"):
            await submit(core, asked)
        for name in ("main", "evaluation"):
            asked = with_variant()
            asked.variants.add(name=name, graph=asked.variants[0].graph, workload=asked.workload)
            with pytest.raises(ServiceError, match="variant"):
                await submit(core, asked)


async def test_an_answer_speaks_of_the_variants_that_were_asked_about() -> None:
    async with make_service(graphs=(graph_bytes(3),)) as core:
        await submit(core, with_variant())
        with pytest.raises(ServiceError, match="those of the request"):
            await work(core, answer())


def key_of(batches: list[object], **options: Any) -> str:
    asked, described = request(), fxlib.Workload.describe(batches, mode="forward", **options)
    asked.workload.CopyFrom(workload_to_proto(described).message)
    return cache_key(asked)


def shuffled(seed: int, rows: int = 1000, size: int = 64) -> list[object]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        fxlib.Batch(
            inputs=(torch.randn(size, 13, generator=drawn), {"ids": torch.randint(rows, (size, 8), generator=drawn)}),
            kwargs={"extra": torch.randint(rows, (size,), generator=drawn)},
            target=torch.randint(10, (size,), generator=drawn),
        )
        for _ in range(4)
    ]


def test_batches_that_are_shuffled_anew_at_each_start_have_one_key() -> None:
    keys = [key_of(shuffled(seed)) for seed in range(40)]
    assert max(keys.count(each) for each in keys) >= 38


def test_batches_of_other_tables_sizes_or_rows_have_keys_of_their_own() -> None:
    others = [shuffled(0), shuffled(0, rows=5000), shuffled(0, rows=50), shuffled(0, size=32), shuffled(0)[:1] * 4]
    assert len({key_of(each) for each in others}) == len(others)
    assert key_of(shuffled(0)) != key_of(shuffled(0), ranges={"target": (0, 1000)})


WIDEST = [
    ("int64", -(2.0**62), 2.0**61),
    ("int64", 0.0, 2.0**62),
    ("float64", -1.7e38, 1.7e38),
    ("float32", 0.0, 3.4e38),
]


@pytest.mark.parametrize("dtype, low, high", WIDEST)
async def test_the_widest_range_that_can_be_described_has_a_key(dtype: str, low: float, high: float) -> None:
    asked = request()
    tensor = asked.workload.description.inputs[0]
    tensor.dtype, tensor.low, tensor.high = dtype, low, high
    async with make_service() as core:
        assert states([await submit(core, asked)]) == ["queued"]


@pytest.mark.parametrize("low, high", [(-1e308, 1e308), (1.7e308, 1.79e308), (-(2.0**63), 2.0**63)])
async def test_a_wider_range_is_refused(low: float, high: float) -> None:
    asked = request()
    tensor = asked.workload.description.inputs[0]
    tensor.dtype, tensor.low, tensor.high = "int64", low, high
    async with make_service() as core:
        with pytest.raises(ServiceError, match=r"Tensors\.(low|high)"):
            await submit(core, asked)


def test_real_batches_have_a_key_of_their_values() -> None:
    real = workload_pb2.Workload(batches=workload_pb2.BatchBlobs(batches=[ref(b"one")]))
    asked, other = request(), request()
    asked.workload.CopyFrom(real)
    other.workload.CopyFrom(workload_pb2.Workload(batches=workload_pb2.BatchBlobs(batches=[ref(b"other")])))
    assert cache_key(asked) != cache_key(other)
