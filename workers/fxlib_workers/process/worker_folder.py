"""The folder of a worker's files: reapers delete it, too, if the worker is killed."""

from __future__ import annotations

from typing_extensions import override

from fxlib.utils.locked_folder import LockedFolder
from fxlib_workers.process.reaper import delete


class WorkerFolder(LockedFolder):
    """A new folder, in place of those that killed workers of this user have left."""

    def __init__(self) -> None:
        super().__init__("fxlib-w-")

    @override
    def delete(self) -> None:
        """Delete the folder and all that is in it, and what killed workers have left."""
        delete(self.path)  # a reaper, or a process that is about to end, may still write there
        super().delete()
