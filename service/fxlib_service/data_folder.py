"""The data folder as a whole. One process at a time uses it, and none does while its restore is incomplete."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from fxlib.errors import FxlibError

RESTORING: Final = "restoring"
"""The file that names the backup being restored into the folder; it is deleted when the restore is done."""
LOCK: Final = "lock"


class DataLock:
    """An exclusive lock on the data folder. The kernel releases it when the process ends, however it ends.

    Args:
        folder: the data folder, which is created if it does not exist.
        restores: whether it is for a restore, which may find the folder partly restored.

    Raises:
        FxlibError: another process holds the lock, its file cannot be made or written, or a restore into the folder was
            not finished.
    """

    def __init__(self, folder: Path, *, restores: bool = False) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FxlibError(f"cannot use {folder}: {error.strerror}", where="--data") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise FxlibError(f"another service uses {folder}", where="--data", hint="Give each its own.") from None
        if (folder / RESTORING).exists() and not restores:
            self.release()
            raise FxlibError(
                f"a backup was being restored into {folder}, which was not finished",
                where="--data",
                hint="Run the restore again, or delete the folder.",
            )

    def release(self) -> None:
        """Release the lock, so that another service can use the folder."""
        os.close(self._descriptor)
