"""The interface of a blob store. Every implementation passes one contract suite."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fxlib_service.errors import invalid

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """The name of a blob: the SHA-256 of its bytes, and how many they are. Never anything that could be a path.

    Raises:
        ServiceError: INVALID_REQUEST, if the digest is not 64 lower-case hex digits, or the size is negative.
    """

    sha256: str
    size: int

    def __post_init__(self) -> None:
        """Refuse what is no digest."""
        if not _DIGEST.fullmatch(self.sha256):
            raise invalid("sha256", "must be 64 lower-case hex digits")
        if self.size < 0:
            raise invalid("size", "must not be negative")


class BlobStore(ABC):
    """Bytes by their SHA-256. Methods may be called from any thread; the writers of one blob take turns (`Uploads`).

    Unfinished uploads of one blob are apart by `owner`, a namespace or "": nobody can spoil, or see, another's.

    Raises, from every writing method:
        ServiceError: STORAGE_FULL, if there is no room.
    """

    @abstractmethod
    def size(self, sha256: str) -> int | None:
        """Return the size of a blob that is completely there, else None. This counts as a use of it."""

    @abstractmethod
    def partial_size(self, sha256: str, *, owner: str = "") -> int:
        """Return how many bytes of an unfinished upload are kept."""

    @abstractmethod
    def append(self, sha256: str, data: bytes, *, owner: str = "") -> int:
        """Add to an unfinished upload, and return how many bytes it has now."""

    @abstractmethod
    def partials(self, owner: str) -> Mapping[str, int]:
        """Return how many bytes of each unfinished upload of an owner are kept, by SHA-256."""

    @abstractmethod
    def drop(self, sha256: str, *, owner: str = "") -> None:
        """Forget an unfinished upload, if there is one."""

    @abstractmethod
    def commit(self, blob: Blob, *, owner: str = "") -> None:
        """Turn an unfinished upload into a blob, durably; the upload is dropped if its bytes are not that blob's.

        Raises:
            ServiceError: BLOB_CORRUPT, if size or digest differ.
        """

    @abstractmethod
    def read(self, sha256: str, *, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset` on; fewer at the end only.

        Raises:
            ServiceError: BLOB_NOT_FOUND.
        """

    @abstractmethod
    def abandon(self, *, older_than_s: float) -> int:
        """Drop unfinished uploads that nothing was added to for so long; return how many."""

    @abstractmethod
    def unused(self, *, older_than_s: float) -> Sequence[str]:
        """Return the blobs that were stored, and last used, so long ago."""

    @abstractmethod
    def delete(self, sha256: str, *, older_than_s: float) -> bool:
        """Delete a blob, unless it was used since; return whether it did. A use cannot come between."""

    def read_all(self, blob: Blob) -> bytes:
        """Return all bytes of a blob.

        Raises:
            ServiceError: BLOB_NOT_FOUND.
        """
        return self.read(blob.sha256, offset=0, length=blob.size)
