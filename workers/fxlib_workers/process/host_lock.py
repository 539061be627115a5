"""The lock of a host: rewrites may run beside each other, a trial runs alone, so that nothing disturbs its clocks.

It is a reader-writer lock on a file (`flock`), which the kernel releases when its holder ends, in whatever way.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.1


class HostLock:
    """A lock in the file at `path`, which is created where there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def rewriting(self, check: Callable[[], None]) -> Iterator[None]:
        """Share the host with other rewrites, for a block; `check` is called while waiting, and may raise."""
        with self._locked(fcntl.LOCK_SH, check):
            yield

    @contextmanager
    def measuring(self, check: Callable[[], None]) -> Iterator[None]:
        """Have the host to oneself, for a block; `check` is called while waiting, and may raise."""
        with self._locked(fcntl.LOCK_EX, check):
            yield

    @contextmanager
    def _locked(self, kind: int, check: Callable[[], None]) -> Iterator[None]:
        descriptor = self._open()
        try:
            while True:
                check()
                try:
                    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            # Without O_CREAT at first: a sticky folder such as /tmp denies it where another user made the file.
            return os.open(self._path, flags)
        except FileNotFoundError:
            return os.open(self._path, flags | os.O_CREAT, 0o644)
