"""What a disk or a database does to a service: each fault is a refusal that says when to come back."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from fxlib.errors import FxlibError
from fxlib.v1 import blobs_pb2
from fxlib_service.blobs.folder import FolderBlobStore
from fxlib_service.convert import checked_blob
from fxlib_service.errors import Code, ServiceError
from fxlib_service.reserve import Reserve
from fxlib_service.storage_faults import refusal_of, translated
from fxlib_service.stores.sql import SqlJobStore
from tests.service.disks import MAY_MOUNT, SmallDisk, small_disk
from tests.service.jobs import add
from tests.service.leasing import leased
from tests.service.support import (
    answer,
    complete,
    get,
    graph_bytes,
    make_service,
    put,
    ref,
    request,
    states,
    stream,
    submit,
)

needs_mount = pytest.mark.skipif(not MAY_MOUNT, reason="only root may mount a small disk")

RESERVE = 2 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as made:
        yield made


@pytest.mark.parametrize(
    "number, code",
    [
        (errno.ENOSPC, Code.STORAGE_FULL),
        (errno.EDQUOT, Code.STORAGE_FULL),
        (errno.EFBIG, Code.STORAGE_FULL),
        (errno.EROFS, Code.STORAGE_UNAVAILABLE),
        (errno.EIO, Code.STORAGE_UNAVAILABLE),
        (errno.EACCES, Code.STORAGE_UNAVAILABLE),
        (errno.EMFILE, Code.STORAGE_UNAVAILABLE),
    ],
)
def test_a_fault_of_the_disk_is_a_refusal_that_may_pass(number: int, code: Code) -> None:
    with pytest.raises(ServiceError) as refusal, translated():
        raise OSError(number, os.strerror(number))
    assert refusal.value.code is code
    assert refusal.value.retry_after_s is not None
    assert os.strerror(number) in str(refusal.value)


def test_a_database_without_room_is_full(tmp_path: Path) -> None:
    store = SqlJobStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    with store._write.connect() as db:
        pages = db.exec_driver_sql("PRAGMA page_count").scalar()

    def limit(connection: sqlite3.Connection, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    store._write.dispose()
    sa.event.listen(store._write, "connect", limit)
    with pytest.raises(ServiceError) as refusal:
        add(store, request=bytes(1 << 20))
    assert refusal.value.code is Code.STORAGE_FULL
    assert "INSERT" not in str(refusal.value)  # nor what was to be stored
    sa.event.remove(store._write, "connect", limit)
    store._write.dispose()
    assert store.stats().oldest_queued_at is None  # nothing half-written stays
    assert store.get(add(store).id) is not None
    store.close()


def test_a_locked_database_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    store = SqlJobStore(f"sqlite:///{path}")
    sa.event.listen(store._write, "checkout", lambda connection, *_: connection.execute("PRAGMA busy_timeout = 10"))
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(ServiceError, match="locked") as refusal:
        add(store)
    assert refusal.value.code is Code.STORAGE_UNAVAILABLE
    holder.execute("ROLLBACK")
    add(store)
    holder.close()
    store.close()


def test_a_database_whose_file_has_gone_is_unavailable_until_it_is_back(tmp_path: Path) -> None:
    file, away = tmp_path / "jobs.sqlite", tmp_path / "away"
    store = SqlJobStore(f"sqlite:///{file}")
    first = add(store)
    file.rename(away)
    for replaced in (False, True):
        if replaced:
            file.write_bytes(away.read_bytes())
        for ask in (store.ping, store.stats, lambda: add(store), lambda: store.release("a" * 64)):
            with pytest.raises(ServiceError, match="the database was deleted, moved or replaced") as refusal:
                ask()
            assert refusal.value.code is Code.STORAGE_UNAVAILABLE
    away.rename(file)
    store.ping()
    assert add(store, cache_key="other") != first == store.get(first.id)
    store.close()


def test_a_statement_that_is_wrong_is_the_service_s_own_fault() -> None:
    error = sa.exc.IntegrityError("INSERT", {}, sqlite3.IntegrityError("UNIQUE"))
    with pytest.raises(sa.exc.IntegrityError), translated():
        raise error


def test_a_database_that_is_full_elsewhere_is_told_by_its_code() -> None:
    class DiskFullError(Exception):
        sqlstate = "53100"

    assert refusal_of(sa.exc.OperationalError("INSERT", {}, DiskFullError("disk full"))).code is Code.STORAGE_FULL


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" + bytes(4096)])
def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "jobs.sqlite"
    path.write_bytes(content)
    with pytest.raises(FxlibError, match=r"--database: the database cannot be used: [^\n]*$"):
        SqlJobStore(f"sqlite:///{path}")


def flip_a_bit(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut_off(path: Path) -> None:
    os.truncate(path, 10)


@pytest.mark.parametrize("harm", [flip_a_bit, cut_off, Path.unlink])
async def test_a_rotten_blob_is_healed_by_its_next_upload(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    blobs = FolderBlobStore(tmp_path)
    async with make_service(blobs=blobs) as core:
        await submit(core, request(fresh=True))
        sha256 = ref(graph_bytes()).sha256
        harm(tmp_path / "blobs" / sha256[:2] / sha256)
        with pytest.raises(ServiceError) as refusal:
            async for _ in core.blobs.Read(blobs_pb2.ReadRequest(blob=ref(graph_bytes())), None):
                pass
        assert refusal.value.code in (Code.BLOB_CORRUPT, Code.BLOB_NOT_FOUND)
        missing = await core.blobs.FindMissing(blobs_pb2.FindMissingRequest(blobs=[ref(graph_bytes())]), None)
        assert [each.sha256 for each in missing.missing] == [sha256]
        with pytest.raises(ServiceError) as refused:
            await submit(core, request(fresh=True))
        assert refused.value.code is Code.BLOB_MISSING
        await put(core, graph_bytes())
        read = [each.data async for each in core.blobs.Read(blobs_pb2.ReadRequest(blob=ref(graph_bytes())), None)]
        assert b"".join(read) == graph_bytes()


async def test_rot_that_nobody_has_read_is_healed_by_who_uploads_all_the_same(tmp_path: Path) -> None:
    blobs = FolderBlobStore(tmp_path)
    async with make_service(blobs=blobs) as core:
        sha256 = ref(graph_bytes()).sha256
        path = tmp_path / "blobs" / sha256[:2] / sha256
        path.write_bytes(bytes(path.stat().st_size))
        await put(core, graph_bytes())
        assert path.read_bytes() == graph_bytes()


async def test_a_request_that_meets_a_rotten_graph_is_asked_to_upload_it(tmp_path: Path) -> None:
    blobs = FolderBlobStore(tmp_path)
    async with make_service(blobs=blobs) as core:
        sha256 = ref(graph_bytes()).sha256
        path = tmp_path / "blobs" / sha256[:2] / sha256
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(ServiceError) as refusal:
            await submit(core, request())
        assert refusal.value.code is Code.BLOB_MISSING
        await put(core, graph_bytes())
        assert states([await submit(core, request())]) == ["queued"]


async def test_a_cached_answer_whose_graph_has_rotted_is_measured_anew(tmp_path: Path) -> None:
    blobs = FolderBlobStore(tmp_path)
    rewritten = graph_bytes(5)
    async with make_service(blobs=blobs, graphs=[rewritten]) as core:
        await submit(core, request())
        result = answer()
        result.graph.CopyFrom(ref(rewritten))
        await complete(core, await leased(core), result)
        sha256 = ref(rewritten).sha256
        path = tmp_path / "blobs" / sha256[:2] / sha256
        path.write_bytes(bytes(path.stat().st_size))
        assert states([await submit(core, request())]) == ["queued"]


@needs_mount
async def test_on_a_full_disk_answers_are_stored_and_what_is_new_is_refused(disk: SmallDisk) -> None:
    reserve = Reserve(disk.path, RESERVE)
    assert reserve.refill()
    store = SqlJobStore(f"sqlite:///{disk.path / 'jobs.sqlite'}")
    async with make_service(store, FolderBlobStore(disk.path), reserve=reserve) as core:
        job = await submit(core, request(fresh=True))
        lease = await leased(core)
        disk.fill()
        await complete(core, lease, answer(reason="NOT_FASTER"))
        assert states([await get(core, job.id)]) == ["succeeded"]
        data = bytes(100_000)
        for refused in (submit(core, request(fresh=True)), put(core, data)):
            with pytest.raises(ServiceError) as refusal:
                await refused
            assert refusal.value.code is Code.STORAGE_FULL
            assert refusal.value.retry_after_s is not None
        assert core.blob_store.partial_size(ref(data).sha256) == 0
        disk.clear()
        assert states([await submit(core, request(fresh=True))]) == ["queued"]
        assert (disk.path / "reserve").stat().st_blocks * 512 == RESERVE


@needs_mount
async def test_on_a_full_disk_a_worker_uploads_for_its_answer_and_a_client_does_not(disk: SmallDisk) -> None:
    reserve = Reserve(disk.path, RESERVE)
    reserve.refill()
    store = FolderBlobStore(disk.path)
    async with make_service(blobs=store, reserve=reserve) as core:
        disk.fill()
        data = bytes(1 << 20)
        first = blobs_pb2.WriteRequest(blob=ref(data), data=data)
        with pytest.raises(ServiceError) as refusal:
            await core.blobs._uploads.write(checked_blob(ref(data)), first, stream([]))
        assert refusal.value.code is Code.STORAGE_FULL
        assert store.partial_size(ref(data).sha256) == 0  # nothing half-written stays
        assert await core.blobs._uploads.write(checked_blob(ref(data)), first, stream([]), reserve=reserve) == len(data)
        assert store.verify(ref(data).sha256)


@needs_mount
def test_a_database_opens_on_a_full_disk_with_the_reserve(disk: SmallDisk) -> None:
    url = f"sqlite:///{disk.path / 'jobs.sqlite'}"
    before = SqlJobStore(url)
    kept = add(before)
    before.close()
    Reserve(disk.path, RESERVE).refill()
    disk.fill()
    with pytest.raises(ServiceError) as refusal:
        SqlJobStore(url)
    assert refusal.value.code is Code.STORAGE_FULL
    after = Reserve(disk.path, RESERVE).within(lambda: SqlJobStore(url))
    assert after.get(kept.id) == kept
    after.close()


@needs_mount
def test_a_reserve_is_allocated_when_there_is_twice_the_room(disk: SmallDisk) -> None:
    reserve = Reserve(disk.path, RESERVE)
    disk.fill(but=RESERVE + RESERVE // 2)
    assert not reserve.refill()
    disk.clear()
    assert reserve.refill()
    assert Reserve(disk.path, RESERVE).refill()
    assert Reserve(disk.path, 2 * RESERVE).refill()
    assert (disk.path / "reserve").stat().st_size == 2 * RESERVE


def test_a_reserve_that_no_disk_has_room_for_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reserve, why = Reserve(tmp_path, 1 << 60), f"bytes are free, and a reserve of {1 << 60} bytes takes twice the room"
    reserve.begin()
    (warned,) = caplog.messages
    assert warned.startswith("--reserve-bytes: new jobs and uploads are refused")
    assert warned.endswith(why)
    with pytest.raises(ServiceError, match=why):
        reserve.check()
