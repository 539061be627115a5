"""The lock of a host: rewrites may run side by side, but a trial runs alone, so that nothing disturbs its timing.

It is a reader-writer lock on a file (`flock`), which the kernel releases when its holder ends in any way.
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
    """A lock in the file at `path`, which is created if it does not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self) -> None:
        """Check that the file can be opened.

        Raises:
            OSError: it cannot be.
        """
        os.close(self._open())

    @contextmanager
    def rewriting(self, check: Callable[[], None]) -> Iterator[None]:
        """Share the host with other rewrites within a block. `check` is called while waiting and may raise."""
        with self._locked(fcntl.LOCK_SH, check):
            yield

    @contextmanager
    def measuring(self, check: Callable[[], None]) -> Iterator[None]:
        """Use the host exclusively within a block. `check` is called while waiting and may raise."""
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
            # First without O_CREAT, which a sticky folder such as /tmp denies if another user made the file.
            return os.open(self._path, flags)
        except FileNotFoundError:
            return os.open(self._path, flags | os.O_CREAT, 0o644)
