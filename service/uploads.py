"""Uploads in turns: one writer to a blob at a time; who comes second finds what the first one left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from fxlib.v1 import blobs_pb2
from service.blobs.base import Blob, BlobStore
from service.errors import Code, ServiceError

_RETRY_AFTER_S: Final = 1.0


class Uploads:
    """Writes streams of chunks into a blob store.

    Args:
        store: where blobs are kept.
        idle_s: a stream that sends nothing for so long is ended; what it sent is kept, to be resumed.
    """

    def __init__(self, store: BlobStore, *, idle_s: float) -> None:
        self._store = store
        self._idle_s = idle_s
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}

    async def write(
        self, blob: Blob, first: blobs_pb2.WriteRequest, more: AsyncIterator[blobs_pb2.WriteRequest]
    ) -> int:
        """Store chunks until the blob is complete or the stream ends; return how many bytes are kept.

        Bytes that are there already are skipped: they are the blob's, or the digest will tell.

        Raises:
            ServiceError: BLOB_OFFSET, BLOB_CORRUPT, UPLOAD_STALLED, STORAGE_FULL.
        """
        async with self._turn(blob.sha256):
            if await asyncio.to_thread(self._store.size, blob.sha256) == blob.size:
                return blob.size
            committed = await asyncio.to_thread(self._store.partial_size, blob.sha256)
            position, chunk = first.offset, first.data
            while True:
                committed = await self._add(blob, committed, position, chunk)
                if committed >= blob.size:
                    await asyncio.to_thread(self._store.commit, blob)
                    return blob.size
                position += len(chunk)
                message = await self._next(more)
                if message is None:
                    return committed
                position, chunk = message.offset or position, message.data

    async def _add(self, blob: Blob, committed: int, position: int, chunk: bytes) -> int:
        if not 0 <= position <= committed:
            message = f"data at {position} of blob {blob.sha256}, of which {committed} bytes are here"
            raise ServiceError(Code.BLOB_OFFSET, message, metadata={"committed_bytes": str(committed)})
        fresh = chunk[committed - position :]
        if committed + len(fresh) > blob.size:
            message = f"more than the {blob.size} bytes that blob {blob.sha256} was announced with"
            raise ServiceError(Code.BLOB_CORRUPT, message)
        return await asyncio.to_thread(self._store.append, blob.sha256, fresh) if fresh else committed

    async def _next(self, more: AsyncIterator[blobs_pb2.WriteRequest]) -> blobs_pb2.WriteRequest | None:
        try:
            async with asyncio.timeout(self._idle_s):
                return await anext(more, None)
        except TimeoutError:
            message = f"nothing was sent for {self._idle_s:g} s"
            raise ServiceError(Code.UPLOAD_STALLED, message, retry_after_s=_RETRY_AFTER_S) from None

    @asynccontextmanager
    async def _turn(self, sha256: str) -> AsyncIterator[None]:
        lock, users = self._turns.get(sha256, (asyncio.Lock(), 0))
        self._turns[sha256] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._turns.pop(sha256)
            if users > 1:
                self._turns[sha256] = lock, users - 1
