"""BlobService: uploads and downloads of content-addressed bytes.

All streams that send one blob add to the same bytes: the stream that is ahead stores them, and none waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from typing_extensions import override

from fxlib.v1 import blobs_pb2, blobs_pb2_grpc, graph_pb2
from fxlib_service.blobs.base import BlobStore, CheckedBlob, damaged
from fxlib_service.config import MIB, Limits
from fxlib_service.convert import checked_blob
from fxlib_service.errors import Code, ServiceError, invalid
from fxlib_service.holdings import Holdings
from fxlib_service.leases import Leases
from fxlib_service.quotas import StorageQuota
from fxlib_service.reserve import Reserve
from fxlib_service.servicers.context import Context, caller_of, lease_of

_CHUNK: Final = MIB
_MAX_REFS: Final = 10_000

T = TypeVar("T")

_RETRY_AFTER_S: Final = 1.0
_LEAST_BYTES_PER_S: Final = 64 << 10


class BlobServicer(blobs_pb2_grpc.BlobServiceServicer):
    """Implements BlobService."""

    def __init__(
        self,
        store: BlobStore,
        holdings: Holdings,
        quota: StorageQuota,
        limits: Limits,
        *,
        leases: Leases,
        reserve: Reserve | None,
    ) -> None:
        self._store = store
        self._holdings = holdings
        self._quota = quota
        self._limits = limits
        self._leases = leases
        self._reserve = reserve
        self._uploads = _Uploads(store, idle_s=limits.upload_idle_s)

    @override
    async def FindMissing(
        self, request: blobs_pb2.FindMissingRequest, context: Context
    ) -> blobs_pb2.FindMissingResponse:
        """Return which blobs must be uploaded."""
        if len(request.blobs) > _MAX_REFS:
            raise invalid("blobs", f"must be at most {_MAX_REFS}")
        blobs = [self._checked(ref, f"blobs[{index}]") for index, ref in enumerate(request.blobs)]
        unknown = await self._holdings.missing(caller_of(context).namespace, {each.sha256: each.size for each in blobs})
        sizes = await asyncio.to_thread(lambda: [self._store.size(blob.sha256) for blob in blobs])
        missing = [
            ref
            for ref, blob, size in zip(request.blobs, blobs, sizes, strict=True)
            if size != blob.size or blob.sha256 in unknown
        ]
        return blobs_pb2.FindMissingResponse(missing=missing)

    @override
    async def QueryWrite(self, request: blobs_pb2.QueryWriteRequest, context: Context) -> blobs_pb2.QueryWriteResponse:
        """Return the offset at which an upload has to be resumed."""
        blob = self._checked(request.blob, "blob")
        namespace = caller_of(context).namespace
        known = await self._holdings.has(namespace, blob.sha256)
        if known and await asyncio.to_thread(self._store.size, blob.sha256) == blob.size:
            return blobs_pb2.QueryWriteResponse(committed_bytes=blob.size, complete=True)
        return blobs_pb2.QueryWriteResponse(committed_bytes=await self._uploads.kept(blob, owner=namespace or ""))

    @override
    async def Write(
        self, request_iterator: AsyncIterator[blobs_pb2.WriteRequest], context: Context
    ) -> blobs_pb2.WriteResponse:
        """Store a blob, or a further part of it."""
        first = await anext(request_iterator, None)
        if first is None:
            raise invalid("blob", "nothing was sent")
        blob = self._checked(first.blob, "blob")
        namespace = caller_of(context).namespace
        leased = await self._leases.holds(lease_of(context))
        if self._reserve is not None and not leased:
            await asyncio.to_thread(self._reserve.check)
        if namespace is None:
            return blobs_pb2.WriteResponse(
                committed_bytes=await self._uploads.write(
                    blob, first, request_iterator, reserve=self._reserve if leased else None
                )
            )
        known = await self._holdings.has(namespace, blob.sha256)
        if known and await asyncio.to_thread(self._has, blob):
            return blobs_pb2.WriteResponse(committed_bytes=blob.size)
        unfinished = await asyncio.to_thread(self._store.partials, namespace)
        uploaded = {blob.sha256, *unfinished, *self._quota.uploaded(namespace)}  # a lost blob is held, and sent again
        held = await self._holdings.bytes_of(namespace, besides=uploaded)
        with self._quota.uploading(namespace, blob, held=held, unfinished=unfinished):
            committed = await self._uploads.write(blob, first, request_iterator, owner=namespace, known=known)
            if committed == blob.size:
                await self._holdings.add(namespace, blob)
        return blobs_pb2.WriteResponse(committed_bytes=committed)

    @override
    async def Read(self, request: blobs_pb2.ReadRequest, context: Context) -> AsyncIterator[blobs_pb2.ReadResponse]:
        """Send a blob from an offset on."""
        sha256 = checked_blob(request.blob).sha256
        known = await self._holdings.has(caller_of(context).namespace, sha256)
        size = await asyncio.to_thread(self._store.size, sha256) if known else None
        if size is None:
            raise ServiceError(Code.BLOB_NOT_FOUND, f"no blob {sha256}")
        if not 0 <= request.offset <= size:
            raise invalid("offset", f"the blob has {size} bytes")
        if request.offset and not await asyncio.to_thread(self._store.verify, sha256):
            raise damaged(sha256)
        digest = hashlib.sha256()
        for offset in range(request.offset, size, _CHUNK):
            data = await asyncio.to_thread(self._store.read, sha256, offset=offset, length=_CHUNK)
            await asyncio.to_thread(digest.update, data)
            yield blobs_pb2.ReadResponse(data=data)
        if not request.offset and digest.hexdigest() != sha256:
            await asyncio.to_thread(self._store.verify, sha256)
            raise damaged(sha256)

    def _has(self, blob: CheckedBlob) -> bool:
        """Return whether a blob is stored undamaged; a damaged one is deleted.

        Raises:
            ServiceError: BLOB_CORRUPT if it is stored and does not have the announced size.
        """
        size = self._store.size(blob.sha256)
        if size is None or not self._store.verify(blob.sha256):
            return False
        if size != blob.size:
            raise ServiceError(Code.BLOB_CORRUPT, f"blob {blob.sha256} has {size} bytes, not {blob.size}")
        return True

    def _checked(self, ref: graph_pb2.BlobRef, field: str) -> CheckedBlob:
        blob = checked_blob(ref, field)
        if blob.size > self._limits.blob_bytes:
            raise invalid(f"{field}.size", f"must be at most {self._limits.blob_bytes} bytes")
        return blob


class _Pace:
    """The time that a stream has left, given its progress. Bytes that are sent again do not count."""

    def __init__(self, *, start: int, idle_s: float) -> None:
        self._began, self._start, self._furthest, self._idle_s = time.monotonic(), start, start, idle_s

    def left_s(self, position: int) -> float:
        self._furthest = max(self._furthest, position)
        allowed_s = self._idle_s + (self._furthest - self._start) / _LEAST_BYTES_PER_S
        return min(self._idle_s, self._began + allowed_s - time.monotonic())


class _Upload:
    """A blob that one or more streams send. `turn` is held while a chunk is stored, and never while waiting for one."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.streams = 0
        self.complete = False


class _Uploads:
    """Writes streams of chunks into a blob store.

    Args:
        store: the store of blobs.
        idle_s: seconds without new bytes, or below the minimum pace of 64 KiB/s, after which a stream is ended. The
            bytes that it sent are kept, and the upload can be resumed.
    """

    def __init__(self, store: BlobStore, *, idle_s: float) -> None:
        self._store = store
        self._idle_s = idle_s
        self._open = dict[tuple[str, str], _Upload]()

    async def write(
        self,
        blob: CheckedBlob,
        first: blobs_pb2.WriteRequest,
        more: AsyncIterator[blobs_pb2.WriteRequest],
        *,
        owner: str = "",
        known: bool = True,
        reserve: Reserve | None = None,
    ) -> int:
        """Store chunks until the blob is complete or the stream ends; return the number of stored bytes.

        Bytes that this stream or another has already stored are skipped; the digest is checked at the end. If the blob
        is not `known` to the `owner`, only the owner's own unfinished upload is continued. An upload for an answer may
        use the disk's `reserve`.

        Raises:
            ServiceError: BLOB_OFFSET, BLOB_CORRUPT, UPLOAD_STALLED, STORAGE_FULL.
        """
        with self._shared(blob.sha256, owner) as upload:
            async with upload.turn:
                if known and await asyncio.to_thread(self._sound, blob):
                    return blob.size
                upload.complete = False  # if it was complete, the blob is gone again
                size = await asyncio.to_thread(self._store.partial_size, blob.sha256, owner=owner)
                if size > blob.size:  # it cannot belong to this blob
                    await asyncio.to_thread(self._store.drop, blob.sha256, owner=owner)
            position, chunk = first.offset, first.data
            pace = _Pace(start=position, idle_s=self._idle_s)
            while True:
                async with upload.turn:
                    committed = blob.size if upload.complete else await self._add(blob, owner, position, chunk, reserve)
                    if committed >= blob.size and not upload.complete:
                        await _written(partial(self._store.commit, blob, owner=owner), reserve)
                        upload.complete = True
                if upload.complete:
                    return blob.size
                position += len(chunk)
                message = await self._next(more, pace.left_s(position))
                if message is None:
                    return committed
                position, chunk = message.offset or position, message.data

    async def kept(self, blob: CheckedBlob, *, owner: str = "") -> int:
        """Return the offset in bytes at which the upload of a blob continues."""
        size = await asyncio.to_thread(self._store.partial_size, blob.sha256, owner=owner)
        return size if size <= blob.size else 0

    def _sound(self, blob: CheckedBlob) -> bool:
        """Return whether a blob is stored undamaged; a client that sends a stored blob may know of damage."""
        return self._store.size(blob.sha256) == blob.size and self._store.verify(blob.sha256)

    async def _add(self, blob: CheckedBlob, owner: str, position: int, chunk: bytes, reserve: Reserve | None) -> int:
        committed = await self.kept(blob, owner=owner)
        if not 0 <= position <= committed:
            message = f"data at {position} of blob {blob.sha256}, of which {committed} bytes are here"
            raise ServiceError(
                Code.BLOB_OFFSET,
                message,
                metadata={"committed_bytes": str(committed)},
                retry_after_s=_RETRY_AFTER_S if position > committed else None,  # bytes of another stream were dropped
            )
        fresh = chunk[committed - position :]
        if committed + len(fresh) > blob.size:
            await asyncio.to_thread(self._store.drop, blob.sha256, owner=owner)
            message = f"more than the {blob.size} bytes that blob {blob.sha256} was announced with"
            raise ServiceError(Code.BLOB_CORRUPT, message)
        if not fresh:
            return committed
        add = partial(self._store.append, blob.sha256, fresh, at=committed, owner=owner)
        if (size := await _written(add, reserve)) == committed + len(fresh):
            return size
        return await self._add(blob, owner, position, chunk, reserve)  # another service has added to it in the meantime

    async def _next(self, more: AsyncIterator[blobs_pb2.WriteRequest], left_s: float) -> blobs_pb2.WriteRequest | None:
        try:
            async with asyncio.timeout(left_s):
                while (message := await anext(more, None)) is not None and not message.data:
                    pass  # an empty message does not restart the timeout
                return message
        except TimeoutError:
            problem = f"nothing, or too little, was sent for {self._idle_s:g} s"
            raise ServiceError(Code.UPLOAD_STALLED, problem, retry_after_s=_RETRY_AFTER_S) from None

    @contextmanager
    def _shared(self, sha256: str, owner: str) -> Iterator[_Upload]:
        """Yield the upload that all streams of an owner's blob share, for the duration of the block."""
        upload = self._open.setdefault((sha256, owner), _Upload())
        upload.streams += 1
        try:
            yield upload
        finally:
            upload.streams -= 1
            if not upload.streams:
                del self._open[sha256, owner]


async def _written(write: Callable[[], T], reserve: Reserve | None) -> T:
    return await asyncio.to_thread(write if reserve is None else partial(reserve.within, write))
