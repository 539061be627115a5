"""Several services on one PostgreSQL database, and what becomes of them when it goes away for a while."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from fxlib.errors import FxlibError
from fxlib.v1 import jobs_pb2
from fxlib_service.blobs.folder import FolderBlobStore
from fxlib_service.clock import Clock
from fxlib_service.config import Address, Config
from fxlib_service.core import Core
from fxlib_service.errors import Code, ServiceError
from fxlib_service.lifecycle import Cancelled, Released, decide
from fxlib_service.server import Server
from fxlib_service.stores import schema
from fxlib_service.stores.postgres import PostgresJobStore
from tests.service.jobs import add, claimed, happen
from tests.service.leasing import leased, report
from tests.service.postgres import Postgres
from tests.service.support import (
    answer,
    claim,
    complete,
    eventually,
    get,
    make_service,
    request,
    states,
    submit,
    work,
    worker,
)
from tests.service.test_live_figures import figures
from tests.service.test_live_figures import report as live_report
from tests.service.test_metrics import samples

pytestmark = pytest.mark.slow

ANYWHERE = Address(host="127.0.0.1", port=0)
YEAR_S = 365 * 24 * 3600.0


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.url()


@pytest.fixture
def stores(url: str) -> Iterator[tuple[PostgresJobStore, PostgresJobStore]]:
    made = PostgresJobStore(url), PostgresJobStore(url)
    yield made
    for store in made:
        store.close()


@asynccontextmanager
async def service(url: str, folder: Path) -> AsyncIterator[Core]:
    async with make_service(PostgresJobStore(url), FolderBlobStore(folder), lease_s=300.0) as core:
        assert core.sharing is not None
        tasks = [
            asyncio.create_task(each)
            for each in (core.sharing.follow(), core.figures.follow(), core.dispatcher.sweep())
        ]
        try:
            yield core
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def watch(core: Core, job_id: str) -> list[int]:
    asked = jobs_pb2.WatchJobRequest(job_id=job_id)
    return [response.event.sequence async for response in core.optimizer.WatchJob(asked, None)]


async def test_what_happens_at_one_service_is_seen_at_the_other(url: str, tmp_path: Path) -> None:
    async with service(url, tmp_path) as here, service(url, tmp_path) as there, asyncio.timeout(250):
        waiting = asyncio.create_task(claim(there, wait_s=60))
        await asyncio.sleep(0.1)
        job = await submit(here)
        watcher = asyncio.create_task(watch(here, job.id))
        lease = await waiting
        assert lease is not None
        await report(here, lease)  # under a lease that the other one gave
        await report(there, lease)
        await complete(there, lease)
        assert await watcher == [1, 2, 3, 4, 5]
        assert states([await get(here, job.id)]) == ["succeeded"]


async def test_services_show_the_same_figures_of_a_model(url: str, tmp_path: Path) -> None:
    def told(core: Core) -> dict[str, float]:
        return {name: value for name, value in samples(core).items() if name.startswith("fxlib_model_")}

    async with service(url, tmp_path) as here, service(url, tmp_path) as there, asyncio.timeout(250):
        for core, gain in ((here, 0.5), (there, 0.3)):
            job = await submit(core, request(fresh=True))
            await work(core, answer(gain=gain))
            await live_report(core, job.id, figures(gain))
        while told(here) != told(there):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        assert told(here)['fxlib_model_live_gain_ratio{bound="value",fxlib_namespace="default",model="dlrm"}'] == 0.3


@pytest.mark.parametrize("ahead_s", [YEAR_S, -YEAR_S])
async def test_a_service_goes_by_the_database_s_time_whatever_its_host_s_is(
    url: str,
    stores: tuple[PostgresJobStore, PostgresJobStore],
    tmp_path: Path,
    ahead_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(Clock.__init__.__kwdefaults__ or {}, "wall", lambda: time.time() + ahead_s)
    job = add(stores[0])
    happen(stores[0], job.id, Cancelled(), now=time.time())
    server = Server(Config(data=tmp_path, database_url=url, listen=ANYWHERE, metrics=ANYWHERE))
    await server.start()
    try:
        core = server._core
        assert core is not None
        assert core.retention is not None
        assert (await core.retention.sweep()).jobs == 0
        assert stores[0].get(job.id) is not None
        assert abs(core.clock.now() - time.time()) < 30
    finally:
        await server.stop()


async def test_a_worker_that_waits_elsewhere_learns_that_an_equal_job_has_ended(url: str, tmp_path: Path) -> None:
    async with service(url, tmp_path) as here, service(url, tmp_path) as there, asyncio.timeout(250):
        first, equal = await submit(here), await submit(there)
        lease = await leased(here)
        waiting = asyncio.create_task(claim(there, worker("w2"), wait_s=60))
        await asyncio.sleep(0.1)
        await here.optimizer.CancelJob(jobs_pb2.CancelJobRequest(job_id=lease.job_id), None)
        other = await waiting
        assert other is not None
        assert {lease.job_id, other.job_id} == {first.id, equal.id}


def test_a_service_that_is_frozen_in_a_transaction_does_not_stop_the_others(
    stores: tuple[PostgresJobStore, PostgresJobStore],
) -> None:
    frozen, other = stores
    with frozen._write.connect() as db:
        for each in ("idle_in_transaction_session_timeout", "lock_timeout"):
            assert db.execute(sa.text(f"SHOW {each}")).scalar() == "10s"
        db.execute(sa.text("SET idle_in_transaction_session_timeout = '0.5s'"))
        frozen._alone(db, "claims")
        job = add(other)  # which takes another lock
        assert other.claim(job.id, lambda known: decide(known, claimed(), 1.0), lease_s=30.0) is not None
        db.invalidate()


async def test_a_notice_in_another_form_sends_watchers_back_to_the_store(url: str) -> None:
    here, there = PostgresJobStore(url), PostgresJobStore(url)
    try:
        async with asyncio.timeout(60), aclosing(here.changes()) as changes:
            assert await anext(changes) is None
            with there._writing() as db:
                db.execute(sa.text("SELECT pg_notify('fxlib_jobs', '0123 someid 7 paused')"))
            assert await anext(changes) is None
            job = add(there)
            found = await anext(changes)
            assert found is not None
            assert found.job_id == job.id
    finally:
        here.close()
        there.close()


def test_services_that_claim_at_once_get_each_job_once(stores: tuple[PostgresJobStore, PostgresJobStore]) -> None:
    equal = [add(stores[0], namespace=namespace).id for namespace in "ab"]
    others = [add(stores[0], cache_key=f"k{number}").id for number in range(6)]
    together = threading.Barrier(4)

    def claims(store: PostgresJobStore) -> list[str]:
        together.wait()
        return [
            job_id
            for job_id in (*equal, *others)
            if store.claim(job_id, lambda job: decide(job, claimed(), 1.0), lease_s=30.0) is not None
        ]

    with ThreadPoolExecutor(4) as pool:
        got = [job_id for claims_ in pool.map(claims, [*stores, *stores]) for job_id in claims_]
    assert sorted(got) == sorted([equal[0], *others])


def test_services_asked_at_once_hold_to_one_queue_and_one_job_for_a_request(
    stores: tuple[PostgresJobStore, PostgresJobStore],
) -> None:
    together = threading.Barrier(4)

    def submits(store: PostgresJobStore) -> list[str]:
        together.wait()
        told = [add(store, request_id="same").id]
        with suppress(Exception):
            while True:
                told.append(add(store, queue_limit=5).id)
        return told

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(submits, [*stores, *stores]))
    assert len({each[0] for each in told}) == 1
    assert len({job_id for each in told for job_id in each}) == 5


def test_a_lease_is_every_service_s_to_extend_and_one_s_to_expire(
    stores: tuple[PostgresJobStore, PostgresJobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxlib_service.stores.postgres._GAP_S", math.inf)  # however slow this machine is
    here, there = stores
    job = add(here)
    assert here.claim(job.id, lambda known: decide(known, claimed(), 1.0), lease_s=0.0) is not None
    extended = there.extend(job.id, "t", 30.0)
    assert extended is not None
    assert extended.worker_id == "w"
    assert (there.extend(job.id, "other", 30.0), there.holds("t"), there.holds("other")) == (None, True, False)
    assert here.take_expired(30.0) == []
    here.extend(job.id, "t", 0.0)
    assert [lease.job_id for lease in there.take_expired(30.0)] == [job.id]
    assert here.take_expired(30.0) == []
    happen(here, job.id, Cancelled())
    assert (there.extend(job.id, "t", 30.0), there.holds("t")) == (None, False)


def test_leases_that_no_service_was_there_to_extend_begin_anew(
    stores: tuple[PostgresJobStore, PostgresJobStore],
) -> None:
    here, there = stores
    job = add(here)
    assert here.claim(job.id, lambda known: decide(known, claimed(), 1.0), lease_s=0.0) is not None
    assert there.take_expired(30.0) == []  # nobody has looked before
    happen(here, job.id, Released(token="t"))
    assert here.claim(job.id, lambda known: decide(known, claimed(), 1.0), lease_s=0.0) is not None
    with here._write.begin() as db:
        db.execute(schema.about.update().values(swept_at=schema.about.c.swept_at - 60.0))
    assert there.take_expired(30.0) == []
    assert here.take_expired(30.0) == []


async def test_a_database_that_goes_away_for_a_while_costs_no_job_its_worker(
    postgres: Postgres, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with service(url, tmp_path) as core, asyncio.timeout(250):
        job = await submit(core)
        lease = await leased(core)
        watcher = asyncio.create_task(watch(core, job.id))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(postgres.stop)
        try:
            for _ in range(2):
                with pytest.raises(ServiceError) as refusal:
                    await get(core, job.id)
                assert refusal.value.code is Code.STORAGE_UNAVAILABLE
                assert refusal.value.retry_after_s is not None
                assert str(postgres.folder) not in str(refusal.value)
            assert not await asyncio.to_thread(core.probe.answers)
            assert await asyncio.to_thread(core.registry.get_sample_value, "fxlib_database_up") == 0.0
        finally:
            await asyncio.to_thread(postgres.start)
        assert await asyncio.to_thread(lambda: any("the database is back" in caplog.text for _ in eventually()))
        await report(core, lease)
        await complete(core, lease)
        assert await watcher == [1, 2, 3, 4]
        assert await asyncio.to_thread(lambda: any(core.probe.answers() for _ in eventually()))
        assert await asyncio.to_thread(core.registry.get_sample_value, "fxlib_jobs", {"state": "succeeded"}) == 1.0
        assert (await get(core, job.id)).attempts == 1
    assert "the database is away" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    "url, told",
    [
        ("postgresql://fxlib:s3cret@127.0.0.1:1/fxlib", "refused"),
        ("postgresql://fxlib:s3cret@/fxlib?host=/no/such/folder", "No such file"),
        ("postgresql://fxlib:s3cret@127.0.0.1:port/fxlib", "port"),
        ("postgresql://fxlib:s3cret@127.0.0.1/fxlib?nonsense=1", "nonsense"),
        ("postgresql+nodriver://fxlib:s3cret@host/db", "nodriver"),
    ],
)
def test_a_database_that_is_away_at_the_start_is_a_sentence_without_the_password(
    url: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(FxlibError, match="--database: the database cannot be used: ") as refusal:
        PostgresJobStore(url)
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert "s3cret" not in str(refusal.value) + caplog.text


def test_text_that_the_database_cannot_hold_is_the_caller_s_fault(url: str) -> None:
    store = PostgresJobStore(url)
    with pytest.raises(ServiceError) as refusal:
        store.get("a\0b")
    assert refusal.value.code is Code.INVALID_REQUEST
    store.close()
