"""A folder for temporary files that is gone with its owner, even one that was killed.

The owner deletes it at its end. One that a killed owner has left is deleted by the next that begins or ends: a folder
is somebody's as long as the lock in it is held, by the owner or by a process that it forked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

_LOCK: Final = "lock"
_UNFINISHED: Final = "lock.new"


class LockedFolder:
    """A new folder below the system's one for temporary files, in place of those that killed owners have left.

    Folders of other users, links, and folders without a lock stay.

    Attributes:
        prefix: what the names of folders of this kind begin with.
        path: the folder.
        lock: the descriptor of its lock, which is closed where another program is executed.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.delete_left()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.lock = os.open(self.path / _UNFINISHED, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        (self.path / _UNFINISHED).rename(self.path / _LOCK)  # held from the first moment that others see it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    def delete(self) -> None:
        """Delete the folder and all that is in it, and what killed owners have left."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)
        self.delete_left()

    def delete_left(self) -> None:
        """Delete what killed owners have left."""
        for each in Path(tempfile.gettempdir()).glob(f"{self.prefix}*"):
            with suppress(OSError):  # an owner that has just begun, or that is just ending
                _delete_if_left(each)


def _delete_if_left(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
