"""Blobs as objects below a URL of fsspec: a bucket of S3, Google Cloud or Azure, or any other store with a driver.

Objects are `blobs/ab/abcd...`. An object cannot be marked as used without writing it, so the age of an empty object
`used/ab/abcd...` shows when the blob was last asked for. Incomplete uploads stay in a local folder.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import fsspec
from typing_extensions import override

from fxlib.errors import FxlibError
from fxlib_service.blobs.base import CheckedBlob, KeepsUploads
from fxlib_service.clock import Clock
from fxlib_service.errors import Code, ServiceError
from fxlib_service.storage_faults import in_full, translated

_PIECE: Final = 8 << 20
"""Number of bytes that are read at a time."""
_RETRY_S: Final = 2.0
_FRESH_S: Final = 600.0
"""Seconds for which a blob that was asked for counts as used, without being marked again."""
_SEEN_S: Final = 5.0
"""Seconds for which it counts as present, without asking again: another service may find it damaged, and delete it."""
_KNOWN: Final = 100_000
_LOCKS: Final = 64
_WHOLE_OR_NOT: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""The stores in which an object appears only when it is complete; in others it is first written under another name."""
_IN_PARTS: Final[Mapping[str, Any]] = {"chunksize": _PIECE, "max_concurrency": 4}
"""How the driver of S3 sends a blob. Left to itself, it holds ten parts of 50 MB of each in memory."""
_MODIFIED: Final = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
"""The keys under which drivers give the time of an object."""
_HIDDEN: Final = "..."
_LEAST_SECRET: Final = 4
"""The length from which a part of a login is hidden: fewer letters are in many words, and tell little."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A blob that was last present at a time of the monotonic clock, and was marked as used at another."""

    size: int
    at_s: float
    marked_s: float


class UrlBlobStore(KeepsUploads):
    """Keeps blobs below a URL, which several services may share.

    A service marks a blob that is asked for as used, at most once in ten minutes. No other service deletes it in that
    time. If it is gone or damaged nevertheless, that is found when it is read, and the next upload restores it.

    Args:
        url: location of the blobs, such as `s3://bucket/prefix`; the driver finds its credentials in its usual way.
        root: local folder of the unfinished uploads.
        clock: judges the age of blobs.
    """

    def __init__(self, url: str, root: Path, clock: Clock | None = None) -> None:
        """Open the store.

        Raises:
            FxlibError: there is no driver for such a URL, or the URL is not valid.
        """
        super().__init__(root, clock)
        self._shown = shown(url)
        self._secrets = _secrets(url)
        protocol = url.partition("://")[0].rpartition("::")[2]
        self._direct = protocol in _WHOLE_OR_NOT
        self._sends = _IN_PARTS if protocol in ("s3", "s3a") else {}
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            hint = 'pip install "fxlib-service[s3]"' if protocol in ("s3", "s3a") else "Install its driver."
            raise FxlibError(
                f"{self._shown} cannot be used: {self._message(error)}", where="--blobs", hint=hint
            ) from error
        except Exception as error:
            hint = f"Known are, with their drivers: {', '.join(sorted(fsspec.available_protocols()))}."
            raise FxlibError(
                f"{self._shown} cannot be used: {self._message(error)}", where="--blobs", hint=hint
            ) from error
        self._root = self._root.rstrip("/")
        self._known: dict[str, _Known] = {}
        self._turns = [threading.Lock() for _ in range(_LOCKS)]
        self._sent = Counter[str]()
        """How many threads send a blob now. It takes as long as the blob is large, and nobody who asks waits for it."""

    def check(self) -> None:
        """Write an object, read it, delete it, and ask for what is not there.

        Raises:
            FxlibError: the store does not answer, or refuses; the error quotes its answer.
        """
        path, doing = f"{self._root}/incoming/{uuid.uuid4().hex}", "written"
        hint = "Are the bucket, the credentials and the endpoint of its driver's right?"
        try:
            self._files.pipe_file(path, b"?")
            doing = "read"
            self._files.cat_file(path)
            doing = "cleared"
            self._files.rm_file(path)
            doing, hint = "asked for what is not there", "S3 tells that to those who may list the bucket."
            self._files.invalidate_cache()
            with suppress(FileNotFoundError):
                self._files.info(path)
        except Exception as error:
            problem = f"{type(error).__name__}: {self._message(error)}"
            raise FxlibError(f"{self._shown} cannot be {doing}: {problem}", where="--blobs", hint=hint) from error

    @override
    def size(self, sha256: str) -> int | None:
        with self._turn(sha256):
            known, now_s = self._known.get(sha256), time.monotonic()
            if known is not None and now_s - known.at_s < _SEEN_S:
                return known.size
            with self._asking(sha256):
                try:
                    found = self._files.info(self._path(sha256))
                except FileNotFoundError:
                    self._known.pop(sha256, None)
                    return None
                if known is None or now_s - known.marked_s >= _FRESH_S:
                    self._files.pipe_file(self._path(sha256, "used"), b"")
                    known = None
            return self._know(sha256, int(found["size"]), marked_s=known.marked_s if known else None)

    @override
    def commit(self, blob: CheckedBlob, *, owner: str = "") -> None:
        path = self._path(blob.sha256)
        with translated(), self.checked(blob, owner) as partial, self._sending(blob.sha256):
            with self._asking(blob.sha256):
                if self._direct:
                    self._files.put_file(str(partial), path, **self._sends)
                else:
                    incoming = f"{self._root}/incoming/{uuid.uuid4().hex}"
                    self._files.put_file(str(partial), incoming)
                    self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                    self._files.mv(incoming, path)
            partial.unlink()
            with self._turn(blob.sha256):
                self._know(blob.sha256, blob.size)

    @override
    def read(self, sha256: str, *, offset: int, length: int) -> bytes:
        try:
            with self._asking(sha256):
                known = self._known.get(sha256)
                size = known.size if known is not None else int(self._files.info(self._path(sha256))["size"])
                end = min(offset + length, size)
                data = self._files.cat_file(self._path(sha256), start=offset, end=end) if offset < end else b""
                return bytes(data)
        except FileNotFoundError:
            raise ServiceError(Code.BLOB_NOT_FOUND, f"no blob {sha256}") from None

    @override
    def verify(self, sha256: str) -> bool:
        path = self._path(sha256)
        try:
            with self._asking(sha256):
                before, digest = self._files.info(path), hashlib.sha256()
                for at in range(0, int(before["size"]), _PIECE):
                    end = min(at + _PIECE, int(before["size"]))
                    digest.update(self._files.cat_file(path, start=at, end=end))
                if digest.hexdigest() == sha256:
                    return True
            with self._turn(sha256), self._asking(sha256):
                self._known.pop(sha256, None)
                # An upload may have replaced it with a sound object in the meantime, or is about to.
                if self._files.info(path) == before and not self._sent[sha256]:
                    self._files.rm_file(path)
                    logger.error("blob %s was damaged in %s, and is deleted", sha256, self._shown)
        except FileNotFoundError:
            pass
        return False

    @override
    def abandon(self, *, older_than_s: float) -> int:
        limit = self._clock.before(older_than_s)
        with self._asking():
            for path, at in self._listed("incoming").items():  # left by a service that was killed
                if at <= limit:
                    with suppress(FileNotFoundError):
                        self._files.rm_file(path)
        return super().abandon(older_than_s=older_than_s)

    @override
    def unused(self, *, older_than_s: float) -> Sequence[str]:
        limit = self._limit(older_than_s)
        with self._asking():
            stored = {_name(path): at for path, at in self._listed("blobs").items()}
            used = {_name(path): at for path, at in self._listed("used").items()}
        return [sha256 for sha256, at in stored.items() if max(at, used.get(sha256, at)) <= limit]

    @override
    def delete(self, sha256: str, *, older_than_s: float) -> bool:
        limit, mark = self._limit(older_than_s), self._path(sha256, "used")
        with self._turn(sha256), self._asking(sha256):
            try:
                used_at = _modified(self._files.info(self._path(sha256)))
                with suppress(FileNotFoundError):
                    used_at = max(used_at, _modified(self._files.info(mark)))
                if used_at > limit or self._sent[sha256]:
                    return False
                self._known.pop(sha256, None)
                self._files.rm_file(self._path(sha256))
            except FileNotFoundError:
                return False
            with suppress(FileNotFoundError):
                self._files.rm_file(mark)
        return True

    @contextmanager
    def _asking(self, sha256: str = "") -> Iterator[None]:
        """Turn any error of the store's driver except FileNotFoundError into a refusal, and forget what was known.

        Raises:
            ServiceError: STORAGE_UNAVAILABLE, without the driver's message, which may hold an address, or more.
        """
        try:
            self._files.invalidate_cache()  # its listings, which others change
            yield
        except FileNotFoundError:
            self._known.pop(sha256, None)
            raise
        except Exception as error:
            self._known.pop(sha256, None)
            logger.warning("blobs in %s: %s: %s", self._shown, type(error).__name__, self._message(error))
            message = "the store of the blobs is away, or refuses"
            raise ServiceError(Code.STORAGE_UNAVAILABLE, message, retry_after_s=_RETRY_S) from error

    @contextmanager
    def _sending(self, sha256: str) -> Iterator[None]:
        """Keep a blob from being deleted in the block, which sends it."""
        with self._turn(sha256):
            self._sent[sha256] += 1
        try:
            yield
        finally:
            with self._turn(sha256):
                self._sent[sha256] -= 1
                if not self._sent[sha256]:
                    del self._sent[sha256]

    def _turn(self, sha256: str) -> threading.Lock:
        """Return the lock under which a blob is asked for and deleted."""
        return self._turns[int(sha256[:2], 16) % _LOCKS]

    def _know(self, sha256: str, size: int, *, marked_s: float | None = None) -> int:
        now_s = time.monotonic()
        if len(self._known) >= _KNOWN:
            self._known = {name: each for name, each in self._known.items() if now_s - each.marked_s < _FRESH_S}
        self._known[sha256] = _Known(size=size, at_s=now_s, marked_s=now_s if marked_s is None else marked_s)
        return size

    def _message(self, error: Exception) -> str:
        """Return a driver's message as one line, without what may be a password in the URL."""
        message = in_full(error)
        for secret in self._secrets:
            message = message.replace(secret, _HIDDEN)
        return message

    def _limit(self, older_than_s: float) -> float:
        """Return the latest time of the mark of a blob that is unused for so long; a mark may lag by `_FRESH_S`."""
        return self._clock.before(older_than_s + min(_FRESH_S, older_than_s))

    def _listed(self, folder: str) -> Mapping[str, float]:
        """Return the times at which the objects of a folder were written, in seconds since the epoch, by path."""
        try:
            found: Mapping[str, Any] = self._files.find(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        return {path: _modified(info) for path, info in found.items()}

    def _path(self, sha256: str, folder: str = "blobs") -> str:
        return f"{self._root}/{folder}/{sha256[:2]}/{sha256}"


def shown(url: str) -> str:
    """Return a URL without any parts that may be a password."""
    scheme, marks, rest = url.partition("://")
    login, at, path = rest.rpartition("@")
    return f"{scheme}{marks}{_HIDDEN if login else ''}{at}{path.partition('?')[0]}"


def _secrets(url: str) -> list[str]:
    """Return what a driver's message may quote of a URL and nobody may read, the longest first.

    Drivers take a login with a slash, as many keys of S3 have one, for a place, and quote a part of it.
    """
    login = url.partition("://")[2].rpartition("@")[0]
    parts = [each for each in re.split("[/@]", login) if len(each) >= _LEAST_SECRET] if ":" in login else []
    found = {url.partition("?")[2], login, *re.findall(r"//([^/@]*(?:@[^/@]*)*)@", url), *parts}
    return sorted(found - {""}, key=len, reverse=True)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _modified(info: Mapping[str, Any]) -> float:
    """Return the time at which an object was written, in seconds since the epoch, or now if the driver does not say."""
    modified = next((info[each] for each in _MODIFIED if info.get(each) is not None), None)
    if isinstance(modified, str):
        modified = datetime.fromisoformat(modified)
    if isinstance(modified, datetime):
        return (modified if modified.tzinfo else modified.replace(tzinfo=UTC)).timestamp()
    return float(modified) if isinstance(modified, (int, float)) else time.time()
