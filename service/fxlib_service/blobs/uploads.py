"""Unfinished uploads as files of a local folder, `partial/abcd...`, wherever a store keeps what is complete."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Final

from typing_extensions import override

from fxlib_service.blobs.base import Blob, BlobStore
from fxlib_service.clock import Clock
from fxlib_service.errors import Code, ServiceError
from fxlib_service.storage_faults import translated

_RETRY_S: Final = 1.0


class KeepsUploads(BlobStore):
    """The half of a store that keeps what has not arrived completely.

    Several services may share a folder whose file system has locks for all of them.

    Args:
        root: the folder of the folder `partial`.
        clock: stamps the files, and judges their age.
    """

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        self._partials = root / "partial"
        self._clock = clock or Clock()
        with translated():
            self._partials.mkdir(parents=True, exist_ok=True)

    @override
    def partial_size(self, sha256: str, *, owner: str = "") -> int:
        with translated():
            try:
                return self._partial(sha256, owner).stat().st_size
            except FileNotFoundError:
                return 0

    @override
    def append(self, sha256: str, data: bytes, *, at: int | None = None, owner: str = "") -> int:
        partial = self._partial(sha256, owner)
        with translated(), partial.open("ab", buffering=0) as file:
            if not _locked(file, partial):
                return 0
            before, left = file.seek(0, os.SEEK_END), memoryview(data)
            if at not in (None, before):
                return before
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(before)  # a piece is stored whole, or not at all
                raise
            self._stamp(file.fileno())
            return file.tell()

    @override
    def partials(self, owner: str) -> Mapping[str, int]:
        found = dict[str, int]()
        with translated():
            for path in self._partials.iterdir():
                sha256, _, whose = path.name.partition(".")
                if whose == owner:
                    with suppress(FileNotFoundError):  # completed meanwhile
                        found[sha256] = path.stat().st_size
        return found

    @override
    def drop(self, sha256: str, *, owner: str = "") -> None:
        with translated():
            self._partial(sha256, owner).unlink(missing_ok=True)

    @contextmanager
    def checked(self, blob: Blob, owner: str) -> Iterator[Path]:
        """Yield the file of an upload that is whole, which nobody else changes meanwhile, with its bytes on the disk.

        Raises:
            ServiceError: BLOB_CORRUPT, if its bytes are not the blob's: then it is deleted; BLOB_OFFSET, if another
                service has just completed it.
        """
        partial = self._partial(blob.sha256, owner)
        with partial.open("ab+") as file:
            mine = _locked(file, partial)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            if not mine or (size == 0 and blob.size):
                if mine:
                    partial.unlink()
                message = f"blob {blob.sha256} was completed by another service"
                raise ServiceError(Code.BLOB_OFFSET, message, retry_after_s=_RETRY_S)
            if size != blob.size or digest != blob.sha256:
                partial.unlink()
                raise ServiceError(Code.BLOB_CORRUPT, f"{size} bytes received are not blob {blob.sha256}")
            os.fsync(file.fileno())
            yield partial

    @override
    def abandon(self, *, older_than_s: float) -> int:
        limit, dropped = self._clock.before(older_than_s), 0
        with translated():
            for path in list(self._partials.iterdir()):
                with suppress(FileNotFoundError):  # completed meanwhile
                    if path.stat().st_mtime <= limit:
                        path.unlink()
                        dropped += 1
        return dropped

    def _stamp(self, file: Path | int) -> None:
        """Note that a file is used now."""
        now = self._clock.now()
        os.utime(file, (now, now))

    def _partial(self, sha256: str, owner: str) -> Path:
        return self._partials / (f"{sha256}.{owner}" if owner else sha256)


def _locked(file: BinaryIO | FileIO, path: Path) -> bool:
    """Keep other services out of a file until it is closed; return whether it is still the one of its name."""
    fcntl.flock(file, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    return False
