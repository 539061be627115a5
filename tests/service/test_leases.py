"""How long a worker holds a job, without a network."""

import asyncio
from unittest.mock import Mock

import pytest

from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_service.core import Core
from fxlib_service.errors import Code, ServiceError
from fxlib_service.job import Job
from fxlib_service.leases import Lease, MemoryLeases
from fxlib_service.lifecycle import Cancelled, Claimed
from tests.service.leasing import leased, pass_time, report
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.memory_job_store import MemoryJobStore
from tests.service.support import (
    claim,
    complete,
    get,
    make_service,
    states,
    submit,
    worker,
)


async def heartbeat(core: Core, lease: workers_pb2.Lease) -> bool:
    beat = workers_pb2.HeartbeatRequest(job_id=lease.job_id, token=lease.token)
    return not (await core.workers.Heartbeat(beat, None)).cancelled


async def release(core: Core, lease: workers_pb2.Lease) -> None:
    await core.workers.Release(workers_pb2.ReleaseRequest(job_id=lease.job_id, token=lease.token), None)


async def lose(core: Core, lease: workers_pb2.Lease) -> None:
    """Let the lease run out."""
    core.dispatcher.leases.end(lease.job_id)
    await core.dispatcher.expire([Lease(job_id=lease.job_id, token=lease.token, worker_id="w1")])


@pytest.mark.slow
async def test_a_silent_worker_loses_its_job_to_another() -> None:
    async with make_service(lease_s=300) as core:
        sweeper = asyncio.create_task(core.dispatcher.sweep())
        await submit(core)
        old = await leased(core)
        pass_time(core, 301)
        new = await claim(core, worker("w2"), wait_s=60)
        sweeper.cancel()
        assert new is not None
        assert (new.job_id, new.attempt) == (old.job_id, 2)
        for act in (heartbeat(core, old), report(core, old), complete(core, old), release(core, old)):
            with pytest.raises(ServiceError) as caught:
                await act
            assert caught.value.code is Code.LEASE_LOST
        await complete(core, new)
        assert states([await get(core, old.job_id)]) == ["succeeded"]


async def test_heartbeats_and_reports_keep_a_lease() -> None:
    async with make_service(lease_s=300) as core:
        await submit(core)
        lease = await leased(core)
        for turn in range(10):
            pass_time(core, 200)
            assert await core.dispatcher.leases.take_expired() == []
            if turn % 2:
                assert await heartbeat(core, lease)
            else:
                await report(core, lease)
        pass_time(core, 301)
        assert [each.job_id for each in await core.dispatcher.leases.take_expired()] == [lease.job_id]


async def test_a_job_that_loses_three_workers_fails_and_says_so() -> None:
    async with make_service() as core:
        job = await submit(core)
        for attempt in (1, 2, 3):
            lease = await leased(core, worker(f"w{attempt}"))
            assert lease.attempt == attempt
            await lose(core, lease)
        ended = await get(core, job.id)
        assert states([ended]) == ["failed"]
        assert ended.failure.code == "WORKER_LOST"
        assert await claim(core) is None


async def test_a_released_job_goes_to_the_next_worker_and_counts_no_attempt() -> None:
    async with make_service() as core:
        await submit(core)
        for _ in range(5):
            lease = await leased(core)
            assert lease.attempt == 1
            await release(core, lease)


async def test_a_worker_learns_that_its_job_was_cancelled() -> None:
    async with make_service() as core:
        job = await submit(core)
        lease = await leased(core)
        assert await heartbeat(core, lease)
        await core.optimizer.CancelJob(jobs_pb2.CancelJobRequest(job_id=job.id), None)
        assert not await heartbeat(core, lease)
        await report(core, lease)
        await complete(core, lease)
        assert states([await get(core, job.id)]) == ["cancelled"]


async def test_a_job_that_is_cancelled_while_it_is_claimed_has_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_service() as core:
        await submit(core)
        claim_ = core.ledger.claim

        async def cancelled(job_id: str, claimed: Claimed, *, lease_s: float) -> Job | None:
            job = await claim_(job_id, claimed, lease_s=lease_s)
            await core.ledger.apply(job_id, Cancelled())
            return job

        monkeypatch.setattr(core.ledger, "claim", cancelled)
        lease = await leased(core)
        assert not await core.dispatcher.leases.holds(lease.token)
        assert not await heartbeat(core, lease)


async def test_a_job_whose_request_cannot_be_read_now_is_claimable_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_service() as core:
        job = await submit(core)
        with monkeypatch.context() as patch:
            patch.setattr(core.ledger.store, "request_of", Mock(side_effect=ServiceError(Code.STORAGE_UNAVAILABLE)))
            with pytest.raises(ServiceError):
                await claim(core)
        lease = await claim(core, wait_s=60)
        assert lease is not None
        assert (lease.job_id, lease.attempt) == (job.id, 1)


@pytest.mark.slow
async def test_a_running_job_stays_with_its_worker_over_a_restart() -> None:
    store, blobs = MemoryJobStore(), MemoryBlobStore()
    async with make_service(store, blobs) as core:
        await submit(core)
        lease = await leased(core)
    async with make_service(store, blobs) as core:
        assert await claim(core, worker("w2")) is None
        assert await heartbeat(core, lease)
        await complete(core, lease)


@pytest.mark.slow
async def test_a_running_job_whose_worker_died_with_the_service_is_claimed_again() -> None:
    store, blobs = MemoryJobStore(), MemoryBlobStore()
    async with make_service(store, blobs) as core:
        await submit(core)
        old = await leased(core)
    async with make_service(store, blobs, lease_s=300) as core:
        pass_time(core, 301)
        sweeper = asyncio.create_task(core.dispatcher.sweep())
        new = await claim(core, worker("w2"), wait_s=60)
        sweeper.cancel()
        assert new is not None
        assert (new.job_id, new.attempt) == (old.job_id, 2)


async def test_a_job_whose_lease_cannot_be_ended_now_is_taken_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_service() as core:
        await submit(core)
        lease = await leased(core)
        monkeypatch.setattr(core.ledger.store, "update", lambda *_: 1 / 0)
        await lose(core, lease)
        monkeypatch.undo()
        assert await heartbeat(core, lease)


async def test_a_lease_lasts_from_its_last_word_and_is_not_shortened_by_what_the_service_slept() -> None:
    now = [0.0]
    leases = MemoryLeases(duration_s=10.0, clock=lambda: now[0])
    lease = Lease(job_id="j", token="t", worker_id="w")
    leases.grant(lease)
    now[0] = 9.0
    assert await leases.extend("j", "t") == lease
    assert await leases.extend("j", "other") is None
    assert await leases.extend("other", "t") is None
    now[0] = 18.9
    assert await leases.take_expired() == []
    leases.postpone(5.0)
    now[0] = 23.9
    assert await leases.take_expired() == []
    now[0] = 24.0
    assert await leases.take_expired() == [lease]
    assert await leases.extend("j", "t") is None
