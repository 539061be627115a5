"""Following a job, without a network."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_service.core import Core
from fxlib_service.errors import Code, ServiceError
from fxlib_service.job import Event
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.memory_job_store import MemoryJobStore
from tests.service.support import claim, complete, make_service, submit, work


async def watch(core: Core, job_id: str, after: int = 0) -> AsyncGenerator[jobs_pb2.JobEvent]:
    request = jobs_pb2.WatchJobRequest(job_id=job_id, after_sequence=after)
    async for response in core.optimizer.WatchJob(request, None):
        yield response.event


async def history(core: Core, job_id: str, after: int = 0) -> list[int]:
    return [event.sequence async for event in watch(core, job_id, after)]


async def report(core: Core, lease: workers_pb2.Lease, times: int) -> None:
    for turn in range(times):
        said = workers_pb2.ReportRequest(
            job_id=lease.job_id, token=lease.token, phase="qps", message=f"block {turn}", progress=turn / times
        )
        await core.workers.Report(said, None)


async def test_a_finished_job_s_history_is_told_and_ends() -> None:
    async with make_service() as core:
        job = await submit(core)
        await work(core)
        events = [event async for event in watch(core, job.id)]
        assert [event.sequence for event in events] == [1, 2, 3]
        assert [event.phase for event in events] == ["queued", "rewrite", "done"]
        assert events[-1].state == jobs_pb2.JOB_STATE_SUCCEEDED


@pytest.mark.parametrize("after", [0, 1, 2, 3])
async def test_watching_resumes_after_a_sequence(after: int) -> None:
    async with make_service() as core:
        job = await submit(core)
        await work(core)
        assert await history(core, job.id, after) == list(range(after + 1, 4))


async def test_a_sequence_that_does_not_exist_yet_is_refused() -> None:
    async with make_service() as core:
        job = await submit(core)
        with pytest.raises(ServiceError) as caught:
            await history(core, job.id, 99)
        assert caught.value.code is Code.SEQUENCE_AHEAD


async def test_an_unknown_job_cannot_be_watched() -> None:
    async with make_service() as core:
        with pytest.raises(ServiceError) as caught:
            await history(core, "none")
        assert caught.value.code is Code.JOB_NOT_FOUND


async def test_a_job_that_is_deleted_when_its_watch_begins_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryJobStore()
    async with make_service(store) as core, asyncio.timeout(60):
        job = await submit(core)
        await work(core)
        read = store.events

        def deleted(job_id: str, *, after: int, limit: int) -> Sequence[Event]:
            store.forget(finished_before=math.inf, limit=1)
            return read(job_id, after=after, limit=limit)

        monkeypatch.setattr(store, "events", deleted)
        with pytest.raises(ServiceError) as caught:
            await history(core, job.id)
        assert caught.value.code is Code.JOB_NOT_FOUND


async def test_live_events_are_told_as_they_happen_to_all_who_watch() -> None:
    async with make_service() as core:
        job = await submit(core)
        watchers = [asyncio.create_task(history(core, job.id, after)) for after in (0, 1) * 50]
        await asyncio.sleep(0.05)
        lease = await claim(core)
        assert lease is not None
        await report(core, lease, 20)
        await complete(core, lease)
        histories = await asyncio.gather(*watchers)
        assert histories == [list(range(after + 1, 24)) for after in (0, 1) * 50]
        assert core.broker.watchers == 0


@pytest.mark.slow
async def test_a_slow_watcher_misses_nothing() -> None:
    async with make_service() as core:
        job = await submit(core)
        events = watch(core, job.id)
        seen = [(await anext(events)).sequence]
        lease = await claim(core)
        assert lease is not None
        pending = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        await report(core, lease, 700)
        await complete(core, lease)
        seen.append((await pending).sequence)
        seen += [event.sequence async for event in events]
        assert seen == list(range(1, 704))


@pytest.mark.slow
async def test_live_events_are_told_without_reading_the_store() -> None:
    async with make_service() as core:
        job = await submit(core)
        reads = 0
        original = core.ledger.store.events

        def counted(*args: object, **kwargs: object) -> object:
            nonlocal reads
            reads += 1
            return original(*args, **kwargs)  # type: ignore[arg-type]

        core.ledger.store.events = counted  # type: ignore[method-assign, assignment]
        watchers = [asyncio.create_task(history(core, job.id)) for _ in range(200)]
        while reads < 200:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
        lease = await claim(core)
        assert lease is not None
        await report(core, lease, 50)
        await complete(core, lease)
        await asyncio.gather(*watchers)
        assert reads == 200


async def test_a_watcher_that_leaves_is_forgotten() -> None:
    async with make_service() as core:
        job = await submit(core)
        async with aclosing(watch(core, job.id)) as events:
            await anext(events)
        watcher = asyncio.create_task(history(core, job.id))
        while not core.broker.watchers:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
        watcher.cancel()
        await asyncio.wait([watcher])
        await asyncio.sleep(0)
        assert core.broker.watchers == 0
        assert core.broker._subscriptions == {}


async def test_watching_goes_on_over_a_restart() -> None:
    store, blobs = MemoryJobStore(), MemoryBlobStore()
    async with make_service(store, blobs) as core:
        job = await submit(core)
        lease = await claim(core)
        assert lease is not None
        watcher = asyncio.create_task(history(core, job.id))
        while not core.broker.watchers:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
    with pytest.raises(ServiceError) as caught:
        await watcher
    assert caught.value.code is Code.SHUTTING_DOWN
    assert caught.value.retry_after_s is not None
    async with make_service(store, blobs) as core:
        again = asyncio.create_task(history(core, job.id, 2))
        await complete(core, lease)
        assert await again == [3]
