"""Disk space that is reserved for answers: a file that is allocated in advance and given up when the disk is full.

While it is given up, new jobs and clients' uploads are refused; the work on accepted jobs continues.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from fxlib_service.errors import Code, ServiceError

_RETRY_AFTER_S: Final = 60.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Reserve:
    """The file `reserve` in the data folder.

    Args:
        folder: the data folder.
        size: the size of the file in bytes.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._path = folder / "reserve"
        self._size = size
        self._lock = threading.Lock()
        self._whole = self._found()

    @property
    def whole(self) -> bool:
        """Whether the file was whole when it was last checked."""
        return self._whole

    def begin(self) -> None:
        """Allocate the file as the service starts, and warn where it cannot be: nothing new is accepted before."""
        if not self.refill():
            logger.warning("--reserve-bytes: new jobs and uploads are refused until the disk has room: %s", self._lack)

    @property
    def _lack(self) -> str:
        return f"{self._room()} bytes are free, and a reserve of {self._size} bytes takes twice the room"

    def check(self) -> None:
        """Refuse new data while the disk has no room for the reserve.

        Raises:
            ServiceError: STORAGE_FULL.
        """
        if not self.refill():
            raise ServiceError(
                Code.STORAGE_FULL,
                "the disk is full; what is left of it is kept for the answers to jobs that were accepted "
                f"({self._lack})",
                retry_after_s=_RETRY_AFTER_S,
            )

    def refill(self) -> bool:
        """Allocate the file if it is not whole and the disk has twice the room for it; return whether it is whole."""
        with self._lock:
            if not self._whole and self._room() >= 2 * self._size:
                self._whole = self._allocate()
                if self._whole:
                    logger.info("%d bytes of the disk are in reserve", self._size)
            return self._whole

    def within(self, write: Callable[[], T]) -> T:
        """Call a function that writes all or nothing; if the disk is full, give up the file and call it once more.

        Raises:
            ServiceError: STORAGE_FULL if there is still no room.
        """
        try:
            return write()
        except ServiceError as error:
            if error.code is not Code.STORAGE_FULL or not self._give_up():
                raise
        return write()

    def _give_up(self) -> bool:
        """Free the file's disk space; return whether it had any."""
        with self._lock:
            had, self._whole = self._found(), False
            try:
                os.truncate(self._path, 0)
            except OSError:
                return False
        if had:
            logger.warning("the disk is full: the reserve is given up, new jobs and uploads are refused")
        return had

    def _found(self) -> bool:
        try:
            found = self._path.stat()
        except OSError:
            return False
        return found.st_size == self._size and found.st_blocks * 512 >= self._size

    def _room(self) -> int:
        try:
            found = os.statvfs(self._path.parent)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    def _allocate(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.ftruncate(descriptor, 0)  # its size differs if the option has changed
            os.posix_fallocate(descriptor, 0, self._size)
        except OSError:
            os.ftruncate(descriptor, 0)
            return False
        finally:
            os.close(descriptor)
        return True
