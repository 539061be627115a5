"""Blobs in this process's memory, for tests: the contract suite runs over them as over the real stores."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence

from typing_extensions import override

from fxlib_service.blobs.base import BlobStore, CheckedBlob
from fxlib_service.errors import Code, ServiceError


class MemoryBlobStore(BlobStore):
    """Two dictionaries."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._used_at: dict[str, float] = {}
        self._lock = threading.Lock()
        self._partials: dict[tuple[str, str], tuple[bytearray, float]] = {}

    @override
    def size(self, sha256: str) -> int | None:
        with self._lock:
            found = self._blobs.get(sha256)
            if found is None:
                return None
            self._used_at[sha256] = time.monotonic()
            return len(found)

    @override
    def partial_size(self, sha256: str, *, owner: str = "") -> int:
        return len(self._partials.get((sha256, owner), (b"", 0.0))[0])

    @override
    def append(self, sha256: str, data: bytes, *, at: int | None = None, owner: str = "") -> int:
        partial, _ = self._partials.get((sha256, owner), (bytearray(), 0.0))
        if at not in (None, len(partial)):
            return len(partial)
        partial += data
        self._partials[sha256, owner] = partial, time.monotonic()
        return len(partial)

    @override
    def partials(self, owner: str) -> Mapping[str, int]:
        return {sha256: len(data) for (sha256, whose), (data, _) in list(self._partials.items()) if whose == owner}

    @override
    def drop(self, sha256: str, *, owner: str = "") -> None:
        self._partials.pop((sha256, owner), None)

    @override
    def commit(self, blob: CheckedBlob, *, owner: str = "") -> None:
        data = bytes(self._partials.pop((blob.sha256, owner), (b"", 0.0))[0])
        if len(data) != blob.size or hashlib.sha256(data).hexdigest() != blob.sha256:
            raise ServiceError(Code.BLOB_CORRUPT, f"{len(data)} bytes received are not blob {blob.sha256}")
        with self._lock:
            self._blobs[blob.sha256] = data
            self._used_at[blob.sha256] = time.monotonic()

    @override
    def read(self, sha256: str, *, offset: int, length: int) -> bytes:
        if sha256 not in self._blobs:
            raise ServiceError(Code.BLOB_NOT_FOUND, f"no blob {sha256}")
        return self._blobs[sha256][offset : offset + length]

    @override
    def verify(self, sha256: str) -> bool:
        with self._lock:
            data = self._blobs.get(sha256)
            if data is not None and hashlib.sha256(data).hexdigest() == sha256:
                return True
            self._blobs.pop(sha256, None)
            self._used_at.pop(sha256, None)
            return False

    @override
    def abandon(self, *, older_than_s: float) -> int:
        limit = time.monotonic() - older_than_s
        old = [key for key, (_, at) in self._partials.items() if at <= limit]
        for key in old:
            del self._partials[key]
        return len(old)

    @override
    def unused(self, *, older_than_s: float) -> Sequence[str]:
        limit = time.monotonic() - older_than_s
        with self._lock:
            return [sha256 for sha256, at in self._used_at.items() if at <= limit]

    @override
    def delete(self, sha256: str, *, older_than_s: float) -> bool:
        with self._lock:
            if self._used_at.get(sha256, math.inf) > time.monotonic() - older_than_s:
                return False
            del self._blobs[sha256], self._used_at[sha256]
            return True
