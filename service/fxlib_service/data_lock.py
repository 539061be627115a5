"""One service to a data folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from fxlib.errors import FxlibError


class DataLock:
    """A lock on a folder, that ends with the process, however that ends.

    Raises:
        FxlibError: another service has it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise FxlibError(f"another service uses {folder}", where="--data", hint="Give each its own.") from None

    def release(self) -> None:
        """Let another service have the folder."""
        os.close(self._descriptor)
