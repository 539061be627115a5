"""The folder of a worker's files, below the system's folder for such; one that a killed worker has left is deleted.

A worker deletes its folder when it ends, and its reapers do if it is killed. Where they were killed with it, the next
worker that begins or ends finds the folder: it is that of a worker that lives as long as the lock in it is held, by the
worker or by a process that it forked.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Final

from fxlib_workers.process.reaper import delete

_PREFIX: Final = "fxlib-w-"
_LOCK: Final = "lock"


class WorkerFolder:
    """A new folder, in place of those that killed workers of this user have left."""

    def __init__(self) -> None:
        _delete_what_is_left()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def delete(self) -> None:
        """Delete the folder and all that is in it, and what killed workers have left."""
        delete(self.path)
        os.close(self._lock)
        _delete_what_is_left()


def _delete_what_is_left() -> None:
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _delete_if_left(left)


def _delete_if_left(folder: Path) -> None:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # a worker that has just begun, or that is just ending
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        delete(folder)
    finally:
        os.close(lock)
