"""Turns at one host: rewrites may run beside each other, a trial runs alone, so that nothing disturbs its clocks.

A reader-writer lock on a file (`flock`), which the kernel lets go when its holder ends, however.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PAUSE_S: Final = 0.1


class HostLock:
    """The lock in the file at `path`, which is made if need be."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def rewriting(self, check: Callable[[], None]) -> Iterator[None]:
        """Hold the host together with other rewrites; `check` is called while waiting, and may raise."""
        with self._held(fcntl.LOCK_SH, check):
            yield

    @contextmanager
    def measuring(self, check: Callable[[], None]) -> Iterator[None]:
        """Hold the host alone; `check` is called while waiting, and may raise."""
        with self._held(fcntl.LOCK_EX, check):
            yield

    @contextmanager
    def _held(self, kind: int, check: Callable[[], None]) -> Iterator[None]:
        descriptor = self._open()
        try:
            while True:
                check()
                try:
                    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_PAUSE_S)
            yield
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            # Not with O_CREAT at once, which a sticky folder such as /tmp denies where another user made the file.
            return os.open(self._path, flags)
        except FileNotFoundError:
            return os.open(self._path, flags | os.O_CREAT, 0o644)
