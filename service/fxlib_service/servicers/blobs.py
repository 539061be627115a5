"""BlobService: uploads and downloads of content-addressed bytes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Final

from typing_extensions import override

from fxlib.v1 import blobs_pb2, blobs_pb2_grpc, graph_pb2
from fxlib_service.blobs.base import Blob, BlobStore, damaged
from fxlib_service.config import MIB, Limits
from fxlib_service.convert import blob_from_proto
from fxlib_service.errors import Code, ServiceError, invalid
from fxlib_service.holdings import Holdings
from fxlib_service.leases import Leases
from fxlib_service.quotas import StorageQuota
from fxlib_service.reserve import Reserve
from fxlib_service.servicers.context import Context, caller_of, lease_of
from fxlib_service.uploads import Uploads

_CHUNK: Final = MIB
_MAX_REFS: Final = 10_000


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
        self._uploads = Uploads(store, idle_s=limits.upload_idle_s)

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
        """Return the offset at which an upload is to be resumed."""
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
        if namespace is None or await self._holdings.has(namespace, blob.sha256):
            return blobs_pb2.WriteResponse(
                committed_bytes=await self._uploads.write(
                    blob, first, request_iterator, reserve=self._reserve if leased else None
                )
            )
        held = await self._holdings.bytes_of(namespace)
        unfinished = await asyncio.to_thread(self._store.partials, namespace)
        with self._quota.uploading(namespace, blob, held=held, unfinished=unfinished):
            committed = await self._uploads.write(blob, first, request_iterator, owner=namespace, known=False)
        if committed == blob.size:
            await self._holdings.add(namespace, blob)
        return blobs_pb2.WriteResponse(committed_bytes=committed)

    @override
    async def Read(self, request: blobs_pb2.ReadRequest, context: Context) -> AsyncIterator[blobs_pb2.ReadResponse]:
        """Send a blob from an offset on."""
        sha256 = blob_from_proto(request.blob).sha256
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

    def _checked(self, ref: graph_pb2.BlobRef, field: str) -> Blob:
        blob = blob_from_proto(ref, field)
        if blob.size > self._limits.blob_bytes:
            raise invalid(f"{field}.size", f"must be at most {self._limits.blob_bytes} bytes")
        return blob
