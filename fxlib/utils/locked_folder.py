"""A folder for temporary files that disappears with its owner, even if the owner is killed.

The owner deletes it at its end. The next owner that begins or ends deletes the folders of killed owners: a folder is in
use as long as the lock in it is held, by the owner or by a process that it forked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Final, Self

_LOCK: Final = "lock"
_UNFINISHED: Final = "lock.new"
_USED: Final = "used"
_TOUCHED_BYTES: Final = 1 << 16


class LockedFolder:
    """A new folder in the system's folder for temporary files; creating it deletes those that killed owners have left.

    Folders of other users, links, and folders without a lock stay.

    Attributes:
        prefix: the beginning of the names of folders of this kind.
        path: the folder.
        lock: the descriptor of its lock, which is closed if another program is executed.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.delete_left()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.lock = os.open(self.path / _UNFINISHED, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        (self.path / _UNFINISHED).rename(self.path / _LOCK)  # held from the moment at which others can see it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    def delete(self) -> None:
        """Delete the folder with everything in it, and the folders that killed owners have left."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)
        self.delete_left()

    def touch(self) -> None:
        """Write to the folder, which also keeps programs away that delete what nobody has used for days.

        Raises:
            FileNotFoundError: the folder was deleted.
            OSError: it cannot be written.
        """
        os.utime(self.path / _LOCK)
        used = self.path / f"{_USED}-{get_ident()}"  # threads touch it side by side
        used.write_bytes(bytes(_TOUCHED_BYTES))
        used.unlink(missing_ok=True)

    def delete_left(self) -> None:
        """Delete the folders that killed owners have left."""
        for each in Path(tempfile.gettempdir()).glob(f"{self.prefix}*"):
            with suppress(OSError):  # the folder of an owner that has just begun, or is just ending
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
