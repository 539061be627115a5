"""The interface of a blob store. Every implementation passes one contract suite."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fxlib_service.errors import Code, ServiceError, invalid

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """The address of a blob: the SHA-256 of its bytes, and their number. It can never be a path.

    Raises:
        ServiceError: INVALID_REQUEST, if the digest is not 64 lower-case hex digits, or the size is negative.
    """

    sha256: str
    size: int

    def __post_init__(self) -> None:
        """Check digest and size."""
        if not _DIGEST.fullmatch(self.sha256):
            raise invalid("sha256", "must be 64 lower-case hex digits")
        if self.size < 0:
            raise invalid("size", "must not be negative")


class BlobStore(ABC):
    """Keeps bytes by their SHA-256. Methods may be called from any thread; `Uploads` serializes the writers of a blob.

    Unfinished uploads of one blob are separate for each `owner`, a namespace or "", so that no namespace can spoil
    or see another's.

    Raises, from every method:
        ServiceError: STORAGE_FULL, if the disk is full; STORAGE_UNAVAILABLE, if it fails in another way.
    """

    @abstractmethod
    def size(self, sha256: str) -> int | None:
        """Return the size of a complete blob in bytes, or None if there is none. Asking counts as a use."""

    @abstractmethod
    def partial_size(self, sha256: str, *, owner: str = "") -> int:
        """Return how many bytes of an unfinished upload are stored."""

    @abstractmethod
    def append(self, sha256: str, data: bytes, *, at: int | None = None, owner: str = "") -> int:
        """Append to an unfinished upload, and return its new size in bytes.

        Nothing is added to one that does not have `at` bytes (if given): another service, which shares the store, has
        added to it meanwhile.
        """

    @abstractmethod
    def partials(self, owner: str) -> Mapping[str, int]:
        """Return the sizes in bytes of an owner's unfinished uploads, by SHA-256."""

    @abstractmethod
    def drop(self, sha256: str, *, owner: str = "") -> None:
        """Delete an unfinished upload, if there is one."""

    @abstractmethod
    def commit(self, blob: Blob, *, owner: str = "") -> None:
        """Turn an unfinished upload into a durable blob, or delete it if its bytes are not that blob's.

        Raises:
            ServiceError: BLOB_CORRUPT, if size or digest differ; BLOB_OFFSET, if another service has just done it.
        """

    @abstractmethod
    def read(self, sha256: str, *, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, or fewer at the end of the blob. They are not checked.

        Raises:
            ServiceError: BLOB_NOT_FOUND.
        """

    @abstractmethod
    def verify(self, sha256: str) -> bool:
        """Read a blob from end to end; return whether it is there and sound. One that is damaged is deleted."""

    @abstractmethod
    def abandon(self, *, older_than_s: float) -> int:
        """Delete unfinished uploads that nothing was added to for `older_than_s` seconds; return how many."""

    @abstractmethod
    def unused(self, *, older_than_s: float) -> Sequence[str]:
        """Return the blobs that were last used at least `older_than_s` seconds ago."""

    @abstractmethod
    def delete(self, sha256: str, *, older_than_s: float) -> bool:
        """Delete a blob, atomically, unless it was used within `older_than_s` seconds; return whether it is gone."""

    def read_all(self, blob: Blob) -> bytes:
        """Return all bytes of a blob, which have its digest. A blob that was damaged is deleted.

        Raises:
            ServiceError: BLOB_NOT_FOUND; BLOB_CORRUPT.
        """
        data = self.read(blob.sha256, offset=0, length=blob.size)
        if hashlib.sha256(data).hexdigest() != blob.sha256:
            self.verify(blob.sha256)
            raise damaged(blob.sha256)
        return data


def damaged(sha256: str) -> ServiceError:
    """Return the refusal for a blob that was damaged where it was stored, and is deleted."""
    return ServiceError(
        Code.BLOB_CORRUPT,
        f"blob {sha256} was damaged in the service's store, and is deleted there",
        hint="Ask again: it is then uploaded anew.",
    )
