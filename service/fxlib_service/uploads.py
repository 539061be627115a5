"""Uploads of blobs. One writer at a time adds to a blob; the next one continues where it stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from fxlib.v1 import blobs_pb2
from fxlib_service.blobs.base import Blob, BlobStore
from fxlib_service.errors import Code, ServiceError

_RETRY_AFTER_S: Final = 1.0
_LEAST_BYTES_PER_S: Final = 64 << 10


class _Pace:
    """The time that a stream has left, given how far it has come. Bytes that are sent again do not count."""

    def __init__(self, *, start: int, idle_s: float) -> None:
        self._began, self._start, self._furthest, self._idle_s = time.monotonic(), start, start, idle_s

    def left_s(self, position: int) -> float:
        self._furthest = max(self._furthest, position)
        allowed_s = self._idle_s + (self._furthest - self._start) / _LEAST_BYTES_PER_S
        return min(self._idle_s, self._began + allowed_s - time.monotonic())


class Uploads:
    """Writes streams of chunks into a blob store.

    Args:
        store: the store of blobs.
        idle_s: seconds without new bytes, or behind the least pace of 64 KiB/s, after which a stream is ended, so that
            others get their turn. What it sent is kept, and the upload can be resumed.
    """

    def __init__(self, store: BlobStore, *, idle_s: float) -> None:
        self._store = store
        self._idle_s = idle_s
        self._turns: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}

    async def write(
        self,
        blob: Blob,
        first: blobs_pb2.WriteRequest,
        more: AsyncIterator[blobs_pb2.WriteRequest],
        *,
        owner: str = "",
        known: bool = True,
    ) -> int:
        """Store chunks until the blob is complete or the stream ends; return how many bytes are stored.

        Bytes that are stored already are skipped; the digest is checked at the end. An `owner` to whom the blob is not
        `known` continues its own unfinished upload alone.

        Raises:
            ServiceError: BLOB_OFFSET, BLOB_CORRUPT, UPLOAD_STALLED, STORAGE_FULL.
        """
        async with self._turn(blob.sha256, owner):
            if known and await asyncio.to_thread(self._store.size, blob.sha256) == blob.size:
                return blob.size
            committed = await self.kept(blob, owner=owner)
            if committed == 0:  # a longer partial upload cannot belong to this blob
                await asyncio.to_thread(self._store.drop, blob.sha256, owner=owner)
            position, chunk = first.offset, first.data
            pace = _Pace(start=position, idle_s=self._idle_s)
            while True:
                committed = await self._add(blob, owner, committed, position, chunk)
                if committed >= blob.size:
                    await asyncio.to_thread(self._store.commit, blob, owner=owner)
                    return blob.size
                position += len(chunk)
                message = await self._next(more, pace.left_s(position))
                if message is None:
                    return committed
                position, chunk = message.offset or position, message.data

    async def kept(self, blob: Blob, *, owner: str = "") -> int:
        """Return the offset in bytes at which an upload of a blob continues."""
        size = await asyncio.to_thread(self._store.partial_size, blob.sha256, owner=owner)
        return size if size <= blob.size else 0

    async def _add(self, blob: Blob, owner: str, committed: int, position: int, chunk: bytes) -> int:
        if not 0 <= position <= committed:
            message = f"data at {position} of blob {blob.sha256}, of which {committed} bytes are here"
            raise ServiceError(Code.BLOB_OFFSET, message, metadata={"committed_bytes": str(committed)})
        fresh = chunk[committed - position :]
        if committed + len(fresh) > blob.size:
            await asyncio.to_thread(self._store.drop, blob.sha256, owner=owner)
            message = f"more than the {blob.size} bytes that blob {blob.sha256} was announced with"
            raise ServiceError(Code.BLOB_CORRUPT, message)
        if not fresh:
            return committed
        return await asyncio.to_thread(self._store.append, blob.sha256, fresh, owner=owner)

    async def _next(self, more: AsyncIterator[blobs_pb2.WriteRequest], left_s: float) -> blobs_pb2.WriteRequest | None:
        try:
            async with asyncio.timeout(left_s):
                while (message := await anext(more, None)) is not None and not message.data:
                    pass  # an empty message does not restart the time
                return message
        except TimeoutError:
            problem = f"nothing, or too little, was sent for {self._idle_s:g} s"
            raise ServiceError(Code.UPLOAD_STALLED, problem, retry_after_s=_RETRY_AFTER_S) from None

    @asynccontextmanager
    async def _turn(self, sha256: str, owner: str) -> AsyncIterator[None]:
        key = sha256, owner
        lock, users = self._turns.get(key, (asyncio.Lock(), 0))
        self._turns[key] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._turns.pop(key)
            if users > 1:
                self._turns[key] = lock, users - 1
