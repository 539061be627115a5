"""The contract of a blob store, run against each implementation."""

import errno
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import fsspec
import pytest

from fxlib.errors import FxlibError
from fxlib_service.blobs.base import BlobStore, CheckedBlob
from fxlib_service.blobs.folder import FolderBlobStore
from fxlib_service.blobs.url import UrlBlobStore
from fxlib_service.clock import Clock
from fxlib_service.config import Config
from fxlib_service.errors import Code, ServiceError
from fxlib_service.open_stores import blob_store
from tests.service.memory_blob_store import MemoryBlobStore

DATA = b"some bytes " * 100


@pytest.fixture(params=["memory", "folder", "memory://", pytest.param("s3://", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    match request.param:
        case "memory":
            return MemoryBlobStore()
        case "folder":
            return FolderBlobStore(tmp_path)
        case "memory://":
            return at_url(tmp_path)
    made = UrlBlobStore(f"{request.getfixturevalue('bucket')}/{tmp_path.name}", tmp_path)
    made.check()
    return made


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A server that speaks the API of S3; one for all tests of a process, which may come to this module twice."""
    from moto.server import ThreadedMotoServer  # half a second, which no other test needs

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    fsspec.filesystem("s3").makedirs("blobs-of-a-test", exist_ok=True)
    return "s3://blobs-of-a-test"


def at_url(tmp_path: Path) -> UrlBlobStore:
    return UrlBlobStore(f"memory://{tmp_path.name}", tmp_path)


def put(store: BlobStore, data: bytes = DATA) -> None:
    store.append(blob(data).sha256, data)
    store.commit(blob(data))


def blob(data: bytes = DATA) -> CheckedBlob:
    return CheckedBlob(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def code(refusal: pytest.ExceptionInfo[ServiceError]) -> Code:
    return refusal.value.code


def test_a_blob_comes_back_as_it_was_stored(store: BlobStore) -> None:
    store.append(blob().sha256, DATA)
    store.commit(blob())
    assert store.size(blob().sha256) == len(DATA)
    assert store.read_all(blob()) == DATA
    assert store.read(blob().sha256, offset=5, length=7) == DATA[5:12]
    assert store.read(blob().sha256, offset=len(DATA) - 2, length=7) == DATA[-2:]
    assert store.partial_size(blob().sha256) == 0


def test_an_empty_blob_is_a_blob(store: BlobStore) -> None:
    store.commit(blob(b""))
    assert store.size(blob(b"").sha256) == 0
    assert store.read_all(blob(b"")) == b""


def test_an_unfinished_upload_is_no_blob(store: BlobStore) -> None:
    assert store.append(blob().sha256, DATA[:100]) == 100
    assert store.append(blob().sha256, DATA[100:150]) == 150
    assert store.partial_size(blob().sha256) == 150
    assert store.size(blob().sha256) is None
    with pytest.raises(ServiceError) as refusal:
        store.read_all(blob())
    assert code(refusal) is Code.BLOB_NOT_FOUND


@pytest.mark.parametrize("received", [DATA[:-1], DATA + b"x", bytes(len(DATA))], ids=["short", "long", "other"])
def test_bytes_that_are_not_the_blob_s_are_dropped(store: BlobStore, received: bytes) -> None:
    store.append(blob().sha256, received)
    with pytest.raises(ServiceError) as refusal:
        store.commit(blob())
    assert code(refusal) is Code.BLOB_CORRUPT
    assert store.size(blob().sha256) is None
    assert store.partial_size(blob().sha256) == 0


def test_abandoned_uploads_are_dropped_and_blobs_are_not(store: BlobStore) -> None:
    store.append(blob().sha256, DATA)
    store.commit(blob())
    store.append(blob(b"other").sha256, b"oth")
    assert store.abandon(older_than_s=3600.0) == 0
    assert store.abandon(older_than_s=0.0) == 1
    assert store.partial_size(blob(b"other").sha256) == 0
    assert store.size(blob().sha256) == len(DATA)


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n", "/" + "a" * 63]
)
def test_only_a_digest_names_a_blob(name: str) -> None:
    with pytest.raises(ServiceError, match="64 lower-case hex digits"):
        CheckedBlob(sha256=name, size=1)


def test_a_size_is_not_negative() -> None:
    with pytest.raises(ServiceError, match="negative"):
        CheckedBlob(sha256="a" * 64, size=-1)


def test_a_folder_keeps_blobs_and_unfinished_uploads_over_restarts(tmp_path: Path) -> None:
    before = FolderBlobStore(tmp_path)
    before.append(blob().sha256, DATA)
    before.commit(blob())
    before.append(blob(b"other").sha256, b"oth")
    after = FolderBlobStore(tmp_path)
    assert after.read_all(blob()) == DATA
    assert after.append(blob(b"other").sha256, b"er") == 5
    after.commit(blob(b"other"))
    assert after.read_all(blob(b"other")) == b"other"


def test_a_folder_without_room_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderBlobStore(tmp_path)
    store.append(blob().sha256, DATA)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ServiceError) as refusal:
        store.commit(blob())
    assert code(refusal) is Code.STORAGE_FULL
    assert refusal.value.retry_after_s is not None
    monkeypatch.undo()
    store.commit(blob())
    assert store.read_all(blob()) == DATA


def test_what_is_unused_is_found_and_deleted(store: BlobStore) -> None:
    store.append(blob().sha256, DATA)
    store.commit(blob())
    assert store.unused(older_than_s=60.0) == []
    assert not store.delete(blob().sha256, older_than_s=60.0)
    assert store.unused(older_than_s=0.0) == [blob().sha256]
    assert store.delete(blob().sha256, older_than_s=0.0)
    assert store.size(blob().sha256) is None
    assert not store.delete(blob().sha256, older_than_s=0.0)
    store.append(blob().sha256, DATA)
    store.commit(blob())
    assert store.read_all(blob()) == DATA


@pytest.mark.slow
def test_to_be_asked_for_is_a_use_that_no_deletion_comes_after(tmp_path: Path) -> None:
    store = FolderBlobStore(tmp_path)
    path = tmp_path / "blobs" / blob().sha256[:2] / blob().sha256
    both = Barrier(2)

    def ask() -> bool:
        both.wait()
        return store.size(blob().sha256) is not None

    with ThreadPoolExecutor(1) as pool:
        for _ in range(200):
            store.append(blob().sha256, DATA)
            store.commit(blob())
            os.utime(path, (1.0, 1.0))
            asked = pool.submit(ask)
            both.wait()
            deleted = store.delete(blob().sha256, older_than_s=60.0)
            assert asked.result() is not deleted
            assert path.exists() is not deleted


def test_two_services_that_are_sent_one_blob_put_it_together_once(tmp_path: Path) -> None:
    here, there = FolderBlobStore(tmp_path), FolderBlobStore(tmp_path)
    assert here.append(blob().sha256, DATA[:100], at=0) == 100
    assert there.append(blob().sha256, DATA[:150], at=0) == 100  # nothing was added
    assert there.append(blob().sha256, DATA[100:], at=100) == len(DATA)
    here.commit(blob())
    with pytest.raises(ServiceError) as refusal:
        there.commit(blob())
    assert code(refusal) is Code.BLOB_OFFSET
    assert refusal.value.retry_after_s is not None
    assert there.read_all(blob()) == DATA
    assert (there.partials(""), there.partial_size(blob().sha256)) == ({}, 0)


def test_a_blob_that_another_service_uses_just_now_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rename = FolderBlobStore(tmp_path), Path.rename
    store.append(blob().sha256, DATA)
    store.commit(blob())
    os.utime(store._path(blob().sha256), (1, 1))

    def used_before(path: Path, target: Path) -> Path:
        os.utime(path)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", used_before)
        assert not store.delete(blob().sha256, older_than_s=60.0)
    assert store.read_all(blob()) == DATA
    os.utime(store._path(blob().sha256), (1, 1))
    assert store.delete(blob().sha256, older_than_s=60.0)
    assert (store.size(blob().sha256), store.partials("")) == (None, {})


def test_a_store_that_is_away_says_when_to_come_back_and_the_upload_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = at_url(tmp_path)
    store.append(blob().sha256, DATA)

    def away(*_: Any, **__: Any) -> None:
        raise RuntimeError("http://user:secret@10.0.0.1 does not answer")

    def asked() -> None:
        store.commit(blob())

    with monkeypatch.context() as patched:
        for name in ("put_file", "info", "find", "cat_file"):
            patched.setattr(store._files, name, away)
        for call in (
            asked,
            lambda: store.size(blob().sha256),
            lambda: store.verify(blob().sha256),
            lambda: store.read(blob().sha256, offset=0, length=1),
            lambda: store.unused(older_than_s=0.0),
            lambda: store.delete(blob().sha256, older_than_s=0.0),
        ):
            with pytest.raises(ServiceError) as refusal:
                call()
            assert code(refusal) is Code.STORAGE_UNAVAILABLE
            assert refusal.value.retry_after_s is not None
            assert "secret" not in str(refusal.value)
    assert store.partial_size(blob().sha256) == len(DATA)
    store.commit(blob())
    assert store.read_all(blob()) == DATA


@pytest.mark.parametrize("found", [b"", DATA[:-1], bytes(len(DATA)), None], ids=["empty", "short", "other", "lost"])
def test_an_object_that_was_damaged_or_lost_is_found_out_and_the_next_upload_heals_it(
    found: bytes | None, tmp_path: Path
) -> None:
    store = at_url(tmp_path)
    put(store)
    if found is None:
        store._files.rm_file(store._path(blob().sha256))
    else:
        store._files.pipe_file(store._path(blob().sha256), found)
    with pytest.raises(ServiceError) as refusal:
        store.read_all(blob())
    assert code(refusal) is (Code.BLOB_NOT_FOUND if found is None else Code.BLOB_CORRUPT)
    assert store.size(blob().sha256) is None
    put(store)
    assert store.read_all(blob()) == DATA


def test_nobody_who_asks_for_a_blob_waits_while_it_is_sent_and_nobody_deletes_it_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sha256 = at_url(tmp_path), blob().sha256
    put_file, found = store._files.put_file, list[object]()

    def send(*names: str) -> None:
        store._files.pipe_file(store._path(sha256), b"damaged")
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(store.size, sha256), threads.submit(store.delete, sha256, older_than_s=0.0)
            found.extend([*(each.result(20) for each in asked), store.verify(sha256)])
        assert store._files.exists(store._path(sha256))
        put_file(*names)

    store.append(sha256, DATA)
    with monkeypatch.context() as patched:
        patched.setattr(store._files, "put_file", send)
        store.commit(blob())
    assert found == [len(b"damaged"), False, False]
    assert store.read_all(blob()) == DATA
    assert store.delete(sha256, older_than_s=0.0)


def test_an_object_that_is_being_written_is_no_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = at_url(tmp_path)
    store.append(blob().sha256, DATA)

    def killed(local: str, path: str) -> None:
        store._files.pipe_file(path, DATA[:10])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store._files, "put_file", killed)
        with pytest.raises(KeyboardInterrupt):
            store.commit(blob())
    assert store.size(blob().sha256) is None
    assert store.unused(older_than_s=0.0) == []
    assert len(store._listed("incoming")) == 1
    store.abandon(older_than_s=0.0)
    assert len(store._listed("incoming")) == 0


def test_a_blob_that_another_service_was_asked_for_of_late_is_kept(tmp_path: Path) -> None:
    here, there = (UrlBlobStore(f"memory://{tmp_path.name}", tmp_path / each) for each in ("here", "there"))
    put(here)
    for store in (here, there):
        store._clock = Clock(wall=lambda: time.time() + 3600)
    assert here.unused(older_than_s=1000.0) == [blob().sha256]
    store._files.pipe_file(store._path(blob().sha256, "used"), b"")
    later = datetime.now(UTC) + timedelta(seconds=3600)
    store._files.store[store._path(blob().sha256, "used")].created = later  # `there` is asked just now
    assert here.unused(older_than_s=1000.0) == []
    assert not here.delete(blob().sha256, older_than_s=1000.0)
    assert here.read_all(blob()) == DATA


@pytest.mark.parametrize(
    "place, told",
    [
        ("nonsense://bucket", "nonsense://bucket cannot be used: Protocol not known"),
        ("file://relative", "names no folder"),
        ("ftp://user:secret@127.0.0.1:1/x", "ftp://...@127.0.0.1:1/x cannot be used"),
        ("s3://key:secret@bucket/x", "s3://...@bucket/x cannot be written: ParamValidationError: "),
        ("s3://key:secret/secret@bucket/x", "s3://...@bucket/x cannot be written: ParamValidationError: "),
        ("zip://a::http://user:secret@127.0.0.1:1/z.zip", "cannot be used: http://...@127.0.0.1:1/z.zip"),
    ],
)
def test_a_place_that_cannot_be_used_is_a_sentence(place: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(FxlibError, match="--blobs") as refusal:
        blob_store(Config(data=tmp_path, blobs=place), Clock())
    assert told in str(refusal.value)
    assert "secret" not in str(refusal.value)
    assert "secret" not in repr(Config(blobs=place))
    assert isinstance(blob_store(Config(data=tmp_path, blobs=f"file://{tmp_path}"), Clock()), FolderBlobStore)


@pytest.mark.parametrize(
    "method, told", [("cat_file", "cannot be read: "), ("info", "cannot be asked for what is not there: ")]
)
def test_a_store_that_may_be_written_and_no_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, told: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Forbidden")

    store = at_url(tmp_path)
    monkeypatch.setattr(store._files, method, refuse)
    with pytest.raises(FxlibError, match=f"--blobs: memory://.* {told}PermissionError: Forbidden"):
        store.check()


@pytest.mark.slow
def test_a_large_blob_is_sent_to_s3_in_parts_of_a_few_megabytes(bucket: str, tmp_path: Path) -> None:
    store, data = UrlBlobStore(f"{bucket}/{tmp_path.name}", tmp_path), bytes(40 << 20)
    put(store, data)
    place, _, name = store._path(blob(data).sha256).partition("/")
    found = store._files.call_s3("head_object", Bucket=place, Key=name, PartNumber=1)
    assert (found["PartsCount"], found["ContentLength"]) == (5, 8 << 20)


def test_a_file_where_the_folder_of_the_blobs_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FxlibError, match=r"^--blobs: cannot use .*/file/.*: Not a directory$"):
        blob_store(Config(data=tmp_path, blobs=str(tmp_path / "file")), Clock())
