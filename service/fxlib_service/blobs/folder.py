"""Blobs as files of a local folder: `blobs/ab/abcd...` when complete, `partial/abcd...` while they arrive."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import override

from fxlib_service.blobs.base import Blob, BlobStore
from fxlib_service.errors import Code, ServiceError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FolderBlobStore(BlobStore):
    """Keeps blobs as files, which are renamed into place once checked and synced; a file's mtime is its last use."""

    def __init__(self, root: Path) -> None:
        self._blobs = root / "blobs"
        self._partials = root / "partial"
        self._uses = threading.Lock()
        for folder in (self._blobs, self._partials):
            folder.mkdir(parents=True, exist_ok=True)

    @override
    def size(self, sha256: str) -> int | None:
        path = self._path(sha256)
        with self._uses:
            try:
                os.utime(path)
                return path.stat().st_size
            except FileNotFoundError:
                return None

    @override
    def partial_size(self, sha256: str, *, owner: str = "") -> int:
        try:
            return self._partial(sha256, owner).stat().st_size
        except FileNotFoundError:
            return 0

    @override
    def append(self, sha256: str, data: bytes, *, owner: str = "") -> int:
        with _room(), self._partial(sha256, owner).open("ab") as file:
            file.write(data)
            file.flush()
            return file.tell()

    @override
    def partials(self, owner: str) -> Mapping[str, int]:
        found = dict[str, int]()
        for path in self._partials.iterdir():
            sha256, _, whose = path.name.partition(".")
            if whose == owner:
                with suppress(FileNotFoundError):  # completed meanwhile
                    found[sha256] = path.stat().st_size
        return found

    @override
    def drop(self, sha256: str, *, owner: str = "") -> None:
        self._partial(sha256, owner).unlink(missing_ok=True)

    @override
    def commit(self, blob: Blob, *, owner: str = "") -> None:
        partial, path = self._partial(blob.sha256, owner), self._path(blob.sha256)
        with _room(), partial.open("ab+") as file:
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            if size == blob.size and digest == blob.sha256:
                os.fsync(file.fileno())
        if size != blob.size or digest != blob.sha256:
            partial.unlink()
            raise ServiceError(Code.BLOB_CORRUPT, f"{size} bytes received are not blob {blob.sha256}")
        with _room():
            path.parent.mkdir(exist_ok=True)
            os.utime(partial)
            partial.rename(path)
            for folder in (path.parent, self._blobs):
                _sync_folder(folder)

    @override
    def read(self, sha256: str, *, offset: int, length: int) -> bytes:
        try:
            with self._path(sha256).open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError:
            raise ServiceError(Code.BLOB_NOT_FOUND, f"no blob {sha256}") from None

    @override
    def abandon(self, *, older_than_s: float) -> int:
        limit, dropped = time.time() - older_than_s, 0
        for path in list(self._partials.iterdir()):
            with suppress(FileNotFoundError):  # completed meanwhile
                if path.stat().st_mtime <= limit:
                    path.unlink()
                    dropped += 1
        return dropped

    @override
    def unused(self, *, older_than_s: float) -> Sequence[str]:
        limit = time.time() - older_than_s
        return [path.name for path in self._blobs.glob("??/*") if path.stat().st_mtime <= limit]

    @override
    def delete(self, sha256: str, *, older_than_s: float) -> bool:
        path = self._path(sha256)
        with self._uses:
            try:
                if path.stat().st_mtime > time.time() - older_than_s:
                    return False
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def _partial(self, sha256: str, owner: str) -> Path:
        return self._partials / (f"{sha256}.{owner}" if owner else sha256)

    def _path(self, sha256: str) -> Path:
        return self._blobs / sha256[:2] / sha256


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ServiceError(Code.STORAGE_FULL, f"{error.strerror}", retry_after_s=60.0) from error
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
