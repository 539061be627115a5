"""Blobs in and out, without a network."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fxlib.v1 import blobs_pb2
from fxlib_service.blobs.folder import FolderBlobStore
from fxlib_service.config import Limits
from fxlib_service.core import Core
from fxlib_service.errors import Code, ServiceError
from tests.service.support import fields, make_service, ref, stream

DATA = bytes(range(256)) * 40
BLOB = ref(DATA)


def chunks(start: int = 0, stop: int = len(DATA), size: int = 1000) -> list[blobs_pb2.WriteRequest]:
    starts = range(start, stop, size)
    messages = [blobs_pb2.WriteRequest(offset=at, data=DATA[at : min(at + size, stop)]) for at in starts]
    messages[0].blob.CopyFrom(BLOB)
    return messages


async def write(core: Core, messages: list[blobs_pb2.WriteRequest]) -> int:
    return (await core.blobs.Write(stream(messages), None)).committed_bytes


async def kept(core: Core) -> tuple[int, bool]:
    told = await core.blobs.QueryWrite(blobs_pb2.QueryWriteRequest(blob=BLOB), None)
    return told.committed_bytes, told.complete


async def read(core: Core, offset: int = 0) -> bytes:
    request = blobs_pb2.ReadRequest(blob=BLOB, offset=offset)
    return b"".join([response.data async for response in core.blobs.Read(request, None)])


async def refusal(core: Core, messages: list[blobs_pb2.WriteRequest]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await write(core, messages)
    return caught.value


async def test_a_blob_goes_in_and_comes_out() -> None:
    async with make_service() as core:
        assert await write(core, chunks()) == len(DATA)
        assert await kept(core) == (len(DATA), True)
        assert await read(core) == DATA
        assert await read(core, 10_000) == DATA[10_000:]
        assert await read(core, len(DATA)) == b""


async def test_only_missing_blobs_need_to_be_sent() -> None:
    async with make_service() as core:
        other = ref(b"other")
        ask = blobs_pb2.FindMissingRequest(blobs=[BLOB, other])
        assert list((await core.blobs.FindMissing(ask, None)).missing) == [BLOB, other]
        await write(core, chunks())
        assert list((await core.blobs.FindMissing(ask, None)).missing) == [other]


async def test_an_interrupted_upload_is_resumed() -> None:
    async with make_service() as core:
        assert await write(core, chunks(stop=4500)) == 4500
        assert await kept(core) == (4500, False)
        assert await write(core, chunks(start=4500)) == len(DATA)
        assert await read(core) == DATA


async def test_bytes_that_are_there_already_are_skipped() -> None:
    async with make_service() as core:
        await write(core, chunks(stop=4500))
        assert await write(core, chunks()) == len(DATA)
        assert await read(core) == DATA


async def test_a_gap_is_refused_with_where_to_go_on() -> None:
    async with make_service() as core:
        await write(core, chunks(stop=1000))
        error = await refusal(core, chunks(start=2000))
        assert error.code is Code.BLOB_OFFSET
        assert error.metadata == {"committed_bytes": "1000"}


async def test_bytes_of_another_blob_are_dropped() -> None:
    async with make_service() as core:
        wrong = chunks()
        wrong[3].data = bytes(1000)
        assert (await refusal(core, wrong)).code is Code.BLOB_CORRUPT
        assert await kept(core) == (0, False)
        assert await write(core, chunks()) == len(DATA)


async def test_more_bytes_than_announced_are_refused() -> None:
    async with make_service() as core:
        more = [*chunks(stop=len(DATA) - 1), blobs_pb2.WriteRequest(offset=len(DATA) - 1, data=b"xyz")]
        assert (await refusal(core, more)).code is Code.BLOB_CORRUPT


async def test_a_blob_announced_too_large_by_another_is_still_taken() -> None:
    async with make_service() as core:
        larger = blobs_pb2.WriteRequest(blob=ref(DATA), data=bytes(2 * len(DATA)))
        larger.blob.size = 10 * len(DATA)
        await write(core, [larger])
        assert await kept(core) == (0, False)
        assert await write(core, chunks()) == len(DATA)
        assert await read(core) == DATA


async def test_what_was_sent_beyond_the_announced_size_is_not_kept() -> None:
    async with make_service() as core:
        await refusal(core, [*chunks(stop=5000), blobs_pb2.WriteRequest(offset=5000, data=bytes(len(DATA)))])
        assert await kept(core) == (0, False)


async def again_and_again(message: blobs_pb2.WriteRequest) -> AsyncIterator[blobs_pb2.WriteRequest]:
    yield chunks()[0]
    while True:
        await asyncio.sleep(0.01)
        yield message


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"", DATA[1:1000]])
async def test_who_sends_nothing_new_is_ended_and_delays_nobody(data: bytes) -> None:
    async with make_service(limits=Limits(upload_idle_s=2.0)) as core:
        squatter = core.blobs.Write(again_and_again(blobs_pb2.WriteRequest(data=data, offset=1)), None)
        task = asyncio.ensure_future(squatter)
        while not core.blobs._uploads._open:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
        assert await write(core, chunks()[:2]) == 2000
        assert not task.done()
        with pytest.raises(ServiceError) as caught:
            await task
        assert caught.value.code is Code.UPLOAD_STALLED


async def test_one_trickling_upload_delays_no_other_of_the_same_blob() -> None:
    released = asyncio.Event()

    async def trickle() -> AsyncIterator[blobs_pb2.WriteRequest]:
        yield chunks(size=1)[0]
        await released.wait()
        yield blobs_pb2.WriteRequest(offset=1, data=DATA[1:])

    async with make_service() as core:
        slow = asyncio.ensure_future(core.blobs.Write(trickle(), None))
        while (await kept(core))[0] == 0:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
        assert await write(core, chunks(start=1)) == len(DATA)
        assert not slow.done()
        assert await read(core) == DATA
        released.set()
        assert (await slow).committed_bytes == len(DATA)
        assert core.blobs._uploads._open == {}


async def test_who_is_overtaken_by_wrong_bytes_is_told_to_come_back() -> None:
    async with make_service() as core:

        async def overtaken() -> AsyncIterator[blobs_pb2.WriteRequest]:
            yield chunks()[0]
            wrong = blobs_pb2.WriteRequest(blob=BLOB, offset=1000, data=bytes(len(DATA) - 1000))
            assert (await refusal(core, [wrong])).code is Code.BLOB_CORRUPT
            yield chunks()[1]

        with pytest.raises(ServiceError) as caught:
            await core.blobs.Write(overtaken(), None)
        assert caught.value.code is Code.BLOB_OFFSET
        assert caught.value.retry_after_s == 1.0
        assert await write(core, chunks()) == len(DATA)


async def test_writers_of_one_blob_all_succeed() -> None:
    async with make_service() as core:
        written = await asyncio.gather(*(write(core, chunks()) for _ in range(10)))
        assert written == [len(DATA)] * 10
        assert await read(core) == DATA
        assert core.blobs._uploads._open == {}


async def test_a_stalled_upload_is_ended_and_kept() -> None:
    async def stalled() -> AsyncIterator[blobs_pb2.WriteRequest]:
        yield chunks()[0]
        await asyncio.sleep(60)

    async with make_service(limits=Limits(upload_idle_s=0.05)) as core:
        with pytest.raises(ServiceError) as caught:
            await core.blobs.Write(stalled(), None)
        assert caught.value.code is Code.UPLOAD_STALLED
        assert await kept(core) == (1000, False)
        assert await write(core, chunks(start=1000, size=len(DATA))) == len(DATA)


async def test_a_blob_is_bounded() -> None:
    async with make_service(limits=Limits(blob_bytes=5000)) as core:
        assert fields(await refusal(core, chunks())) == ["blob.size"]


@pytest.mark.parametrize("name", ["", "../../../../etc/passwd", "ABC", "a" * 63 + "/"])
async def test_a_blob_is_named_by_its_digest_alone(name: str) -> None:
    async with make_service() as core:
        first = chunks()[0]
        first.blob.sha256 = name
        assert fields(await refusal(core, [first])) == ["blob.sha256"]
        with pytest.raises(ServiceError):
            await core.blobs.QueryWrite(blobs_pb2.QueryWriteRequest(blob=first.blob), None)
        with pytest.raises(ServiceError):
            await anext(core.blobs.Read(blobs_pb2.ReadRequest(blob=first.blob), None))
        with pytest.raises(ServiceError):
            await core.blobs.FindMissing(blobs_pb2.FindMissingRequest(blobs=[first.blob]), None)


async def test_an_upload_of_nothing_is_refused() -> None:
    async with make_service() as core:
        assert fields(await refusal(core, [])) == ["blob"]


async def test_too_many_blobs_at_once_are_refused() -> None:
    async with make_service() as core:
        with pytest.raises(ServiceError):
            await core.blobs.FindMissing(blobs_pb2.FindMissingRequest(blobs=[BLOB] * 10_001), None)


@pytest.mark.parametrize("offset", [-1, 1 << 40])
async def test_a_blob_is_read_within_its_bounds(offset: int) -> None:
    async with make_service() as core:
        await write(core, chunks())
        with pytest.raises(ServiceError):
            await read(core, offset)


async def test_an_unknown_blob_is_not_found() -> None:
    async with make_service() as core:
        with pytest.raises(ServiceError) as caught:
            await read(core)
        assert caught.value.code is Code.BLOB_NOT_FOUND


async def test_two_services_with_one_folder_take_a_blob_from_two_senders_at_once(tmp_path: Path) -> None:
    async with (
        make_service(blobs=FolderBlobStore(tmp_path)) as here,
        make_service(blobs=FolderBlobStore(tmp_path)) as there,
    ):
        sent = await asyncio.gather(write(here, chunks()), write(there, chunks(size=700)), return_exceptions=True)
        refused = [each for each in sent if isinstance(each, BaseException)]
        for each in refused:  # which says to come back, and where to go on
            assert isinstance(each, ServiceError)
            assert each.code is Code.BLOB_OFFSET
            assert each.retry_after_s is not None
        assert len(refused) < 2
        assert [await read(core) for core in (here, there)] == [DATA, DATA]
        assert [await write(core, chunks()) for core in (here, there)] == [len(DATA)] * 2
