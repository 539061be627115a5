"""The interface of a blob store. Every implementation passes one contract suite.

An upload that is not complete is a file in a local folder, `partial/abcd...`, wherever a store keeps complete blobs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Final

from typing_extensions import override

from fxlib.spec.job import Blob
from fxlib_service.clock import Clock
from fxlib_service.errors import Code, ServiceError, invalid
from fxlib_service.storage_faults import translated

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBlob(Blob):
    """The address of a blob with a well-formed digest, which can never be a path.

    Raises:
        ServiceError: INVALID_REQUEST if the digest is not 64 lower-case hex digits, or the size is negative.
    """

    def __post_init__(self) -> None:
        """Check digest and size."""
        if not _DIGEST.fullmatch(self.sha256):
            raise invalid("sha256", "must be 64 lower-case hex digits")
        if self.size < 0:
            raise invalid("size", "must not be negative")


class BlobStore(ABC):
    """Stores bytes by their SHA-256. Methods may be called from any thread; a servicer serializes a blob's writers.

    Unfinished uploads of one blob are separate for each `owner`, a namespace or "", so that no namespace can spoil
    or see another's.

    Raises, from every method:
        ServiceError: STORAGE_FULL if the disk is full; STORAGE_UNAVAILABLE if it fails in another way.
    """

    @abstractmethod
    def size(self, sha256: str) -> int | None:
        """Return the size of a complete blob in bytes, or None if there is none. Asking counts as a use."""

    @abstractmethod
    def partial_size(self, sha256: str, *, owner: str = "") -> int:
        """Return the number of stored bytes of an unfinished upload."""

    @abstractmethod
    def append(self, sha256: str, data: bytes, *, at: int | None = None, owner: str = "") -> int:
        """Append to an unfinished upload and return its new size in bytes.

        If `at` is given and the upload does not have that many bytes, nothing is appended: another service that shares
        the store has appended to it in the meantime.
        """

    @abstractmethod
    def partials(self, owner: str) -> Mapping[str, int]:
        """Return the sizes in bytes of an owner's unfinished uploads, by SHA-256."""

    @abstractmethod
    def drop(self, sha256: str, *, owner: str = "") -> None:
        """Delete an unfinished upload, if there is one."""

    @abstractmethod
    def commit(self, blob: CheckedBlob, *, owner: str = "") -> None:
        """Turn an unfinished upload into a durable blob, or delete it if its bytes do not match that blob.

        Raises:
            ServiceError: BLOB_CORRUPT if size or digest differ; BLOB_OFFSET if another service has just committed it.
        """

    @abstractmethod
    def read(self, sha256: str, *, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, or fewer at the end of the blob, without checking them.

        Raises:
            ServiceError: BLOB_NOT_FOUND.
        """

    @abstractmethod
    def verify(self, sha256: str) -> bool:
        """Read a whole blob and return whether it exists and is sound. A damaged blob is deleted."""

    @abstractmethod
    def abandon(self, *, older_than_s: float) -> int:
        """Delete unfinished uploads to which nothing was added for `older_than_s` seconds; return their number."""

    @abstractmethod
    def unused(self, *, older_than_s: float) -> Sequence[str]:
        """Return the blobs that were last used at least `older_than_s` seconds ago."""

    @abstractmethod
    def delete(self, sha256: str, *, older_than_s: float) -> bool:
        """Delete a blob atomically unless it was used within `older_than_s` seconds; return whether it is gone."""

    def read_all(self, blob: CheckedBlob) -> bytes:
        """Return all bytes of a blob after checking its digest. A damaged blob is deleted.

        Raises:
            ServiceError: BLOB_NOT_FOUND; BLOB_CORRUPT.
        """
        data = self.read(blob.sha256, offset=0, length=blob.size)
        if hashlib.sha256(data).hexdigest() != blob.sha256:
            self.verify(blob.sha256)
            raise damaged(blob.sha256)
        return data


def damaged(sha256: str) -> ServiceError:
    """Return the refusal for a blob that was damaged in storage and has been deleted."""
    return ServiceError(
        Code.BLOB_CORRUPT,
        f"blob {sha256} was damaged in the service's store, and is deleted there",
        hint="Ask again: it is then uploaded anew.",
    )


class KeepsUploads(BlobStore):
    """The half of a store that keeps incomplete uploads.

    Several services may share a folder whose file system has locks for all of them.

    Args:
        root: the folder that contains the folder `partial`.
        clock: sets the times of files, and judges their age.
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
                file.truncate(before)  # a piece is stored entirely or not at all
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
    def checked(self, blob: CheckedBlob, owner: str) -> Iterator[Path]:
        """Yield the file of a complete upload, with its bytes on the disk; nobody else changes it within the block.

        Raises:
            ServiceError: BLOB_CORRUPT if its bytes do not match the blob, and then it is deleted; BLOB_OFFSET if
                another service has just completed it.
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
        """Record that a file is used now."""
        now = self._clock.now()
        os.utime(file, (now, now))

    def _partial(self, sha256: str, owner: str) -> Path:
        return self._partials / (f"{sha256}.{owner}" if owner else sha256)


def _locked(file: BinaryIO | FileIO, path: Path) -> bool:
    """Keep other services out of a file until it is closed; return whether its name still refers to it."""
    fcntl.flock(file, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    return False
