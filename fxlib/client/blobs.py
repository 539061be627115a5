"""Transfer blobs in parts: only those that the service lacks are sent, and an interrupted transfer is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import grpc

from fxlib.client.connection import Connection, Deadline
from fxlib.errors import LimitError, RejectedError, WireError
from fxlib.protocol import LEASE, blob_to_proto
from fxlib.spec.job import Blob
from fxlib.v1 import blobs_pb2, graph_pb2

CHUNK_BYTES = 1 << 20
PART_BYTES = 8 << 20
"""Size in bytes of the part that is sent in one call, small enough for a slow link within one call's time limit."""

BLOB_CORRUPT = "BLOB_CORRUPT"
"""The service's error code for bytes whose digest is not the blob's."""

MAX_GRAPH_BYTES = 1 << 30
_REFS_PER_CALL = 1000


def upload(connection: Connection, blobs: Mapping[str, bytes], deadline: Deadline, *, lease: str = "") -> int:
    """Upload blobs, by SHA-256, to the service; return the number of bytes that it lacked.

    Args:
        connection: the connection to the service.
        blobs: the blobs, by SHA-256.
        deadline: the deadline for all calls together.
        lease: the token of the worker's lease, if the blobs belong to its answer; a service whose disk is full has a
            reserve for those.

    Raises:
        ServiceUnavailableError: the service was not reached in time.
        RejectedError: the service refused a blob.
    """
    refs = [graph_pb2.BlobRef(sha256=sha256, size=len(data)) for sha256, data in blobs.items()]
    missing: list[graph_pb2.BlobRef] = []
    for start in range(0, len(refs), _REFS_PER_CALL):
        missing += _missing(connection, refs[start : start + _REFS_PER_CALL], deadline)
    for ref in missing:
        try:
            _send(connection, ref, blobs[ref.sha256], deadline, lease)
        except RejectedError as error:
            if error.code != BLOB_CORRUPT:
                raise
            # The bytes that others had sent under this name were not the blob; the service has dropped them.
            _send(connection, ref, blobs[ref.sha256], deadline, lease)
    return sum(ref.size for ref in missing)


def download(connection: Connection, blob: Blob, deadline: Deadline) -> bytes:
    """Fetch a blob.

    Raises:
        ServiceUnavailableError: the service was not reached in time.
        RejectedError: the service has no such blob.
        WireError: the bytes do not have the digest in the address, or there are too many.
    """
    if blob.size > MAX_GRAPH_BYTES:
        raise LimitError(f"{blob.size} bytes are more than {MAX_GRAPH_BYTES}", where=f"blob {blob.sha256}")
    read = _Download(connection, blob)
    while not connection.call("fetching the rewritten graph", read, deadline):
        pass
    data = bytes(read.data)
    if hashlib.sha256(data).hexdigest() != blob.sha256:
        raise WireError("the bytes received are not those that were announced", where=f"blob {blob.sha256}")
    return data


def _send(connection: Connection, ref: graph_pb2.BlobRef, data: bytes, deadline: Deadline, lease: str) -> None:
    part = _Part(connection, ref, data, lease)
    while not connection.call("uploading a blob", part, deadline):
        pass


def _missing(connection: Connection, refs: Sequence[graph_pb2.BlobRef], deadline: Deadline) -> list[graph_pb2.BlobRef]:
    request = blobs_pb2.FindMissingRequest(blobs=refs)
    answer = connection.call(
        "asking for missing blobs", lambda left_s: connection.blobs.FindMissing(request, timeout=left_s), deadline
    )
    asked = {ref.sha256 for ref in refs}
    return [ref for ref in answer.missing if ref.sha256 in asked]


class _Part:
    """The next part of a blob to upload; calling it sends the part, and returns whether the blob is complete."""

    def __init__(self, connection: Connection, ref: graph_pb2.BlobRef, data: bytes, lease: str) -> None:
        self._stub, self._ref, self._data = connection.blobs, ref, memoryview(data)
        self._metadata = ((LEASE, lease),) if lease else ()

    def __call__(self, left_s: float) -> bool:
        stored = self._stub.QueryWrite(blobs_pb2.QueryWriteRequest(blob=self._ref), timeout=left_s)
        if stored.complete:
            return True
        written = self._stub.Write(self._chunks(stored.committed_bytes), timeout=left_s, metadata=self._metadata)
        return written.committed_bytes == self._ref.size

    def _chunks(self, start: int) -> Iterator[blobs_pb2.WriteRequest]:
        yield blobs_pb2.WriteRequest(blob=self._ref, offset=start)
        for offset in range(start, min(start + PART_BYTES, self._ref.size), CHUNK_BYTES):
            data = bytes(self._data[offset : min(offset + CHUNK_BYTES, start + PART_BYTES)])
            yield blobs_pb2.WriteRequest(offset=offset, data=data)


class _Download:
    """The download of one blob, each attempt from where the last one ended; calling it returns whether it has ended.

    An attempt that runs out of time has failed only if it brought nothing.
    """

    def __init__(self, connection: Connection, blob: Blob) -> None:
        self._stub, self._blob = connection.blobs, blob
        self.data = bytearray()

    def __call__(self, left_s: float) -> bool:
        before = len(self.data)
        request = blobs_pb2.ReadRequest(blob=blob_to_proto(self._blob), offset=before)
        try:
            for chunk in self._stub.Read(request, timeout=left_s):
                self.data += chunk.data
                if len(self.data) > self._blob.size:
                    raise WireError("more bytes than announced", where=f"blob {self._blob.sha256}")
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED or len(self.data) == before:
                raise
            return False
        return True
