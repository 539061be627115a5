"""Blobs as files in a local folder: `blobs/ab/abcd...` when complete, `partial/abcd...` while they arrive."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from typing_extensions import override

from fxlib_service.blobs.base import CheckedBlob, KeepsUploads, damaged
from fxlib_service.clock import Clock
from fxlib_service.errors import Code, ServiceError
from fxlib_service.storage_faults import translated

_PIECE: Final = 1 << 20
"""Number of bytes that are checked at a time."""

logger = logging.getLogger(__name__)


class FolderBlobStore(KeepsUploads):
    """Keeps blobs as files, which are renamed into place after they are checked and synced. The mtime is the last use.

    Several services may share a folder whose file system has locks for all of them.

    Args:
        root: the data folder.
        clock: sets the times of files, and judges their age.
    """

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        super().__init__(root, clock)
        self._blobs = root / "blobs"
        self._uses = threading.Lock()
        with translated():
            self._blobs.mkdir(parents=True, exist_ok=True)

    @override
    def size(self, sha256: str) -> int | None:
        path = self._path(sha256)
        with translated(), self._uses:
            try:
                self._stamp(path)
                return path.stat().st_size
            except FileNotFoundError:
                return None

    @override
    def commit(self, blob: CheckedBlob, *, owner: str = "") -> None:
        path = self._path(blob.sha256)
        with translated():
            with self.checked(blob, owner) as partial:
                path.parent.mkdir(exist_ok=True)
                self._stamp(partial)
                partial.rename(path)
            for folder in (path.parent, self._blobs):
                sync_folder(folder)

    @override
    def read(self, sha256: str, *, offset: int, length: int) -> bytes:
        with translated():
            try:
                with self._path(sha256).open("rb") as file:
                    file.seek(offset)
                    return file.read(length)
            except FileNotFoundError:
                raise ServiceError(Code.BLOB_NOT_FOUND, f"no blob {sha256}") from None
            except OSError as error:
                if error.errno == errno.EIO and not self.verify(sha256):
                    raise damaged(sha256) from error
                raise

    @override
    def verify(self, sha256: str) -> bool:
        path = self._path(sha256)
        with translated():
            try:
                with path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    if _digest(file) == sha256:
                        return True
            except FileNotFoundError:
                return False
            with self._uses:
                # An upload may have replaced it with a sound file in the meantime.
                if path.exists() and path.stat().st_ino == found.st_ino:
                    path.unlink()
                    logger.error("blob %s was damaged on the disk, and is deleted", sha256)
        return False

    @override
    def unused(self, *, older_than_s: float) -> Sequence[str]:
        limit, found = self._clock.before(older_than_s), list[str]()
        with translated():
            for path in self._blobs.glob("??/*"):
                with suppress(FileNotFoundError):  # found damaged in the meantime
                    if path.stat().st_mtime <= limit:
                        found.append(path.name)
        return found

    @override
    def delete(self, sha256: str, *, older_than_s: float) -> bool:
        path, limit = self._path(sha256), self._clock.before(older_than_s)
        aside = self._partials / f"{sha256}..deleted"  # no namespace starts with a dot
        with translated(), self._uses:
            try:
                if path.stat().st_mtime > limit:
                    return False
                path.rename(aside)
                if aside.stat().st_mtime > limit:  # another service that shares the folder has just used it
                    aside.rename(path)
                    return False
                aside.unlink()
            except FileNotFoundError:
                return False
        return True

    def _path(self, sha256: str) -> Path:
        return self._blobs / sha256[:2] / sha256


def _digest(file: BinaryIO) -> str:
    """Return the digest of a file's bytes, or "" if the disk cannot read some of them."""
    digest = hashlib.sha256()
    try:
        while piece := file.read(_PIECE):
            digest.update(piece)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return ""
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names of its files are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
