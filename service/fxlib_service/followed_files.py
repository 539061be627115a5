"""Files that are read again whenever they have changed, while the service runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_LOOK_S: Final = 0.5
"""The time between two looks at the files. One that has changed is read at the second look that finds it the same, so
that whoever writes it is done."""

_State = tuple[int, ...]


class FollowedFiles:
    """Tells of changes of files, since they were named here; None stands for a file that there is not.

    Attributes:
        asked: is set by whoever wants the files read now.
    """

    def __init__(self, *paths: Path | None) -> None:
        self._paths = [path for path in paths if path is not None]
        self._read = self._states()
        self.asked = asyncio.Event()

    async def changes(self) -> AsyncIterator[None]:
        """Yield each time that the files are to be read again; it ends by being cancelled, or if there are no files."""
        seen = self._read
        while self._paths:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.asked.wait(), _LOOK_S)
            now = await asyncio.to_thread(self._states)
            if self.asked.is_set() or (now == seen and now != self._read):
                self.asked.clear()
                self._read = now
                yield
            seen = now

    def _states(self) -> tuple[_State, ...]:
        return tuple(map(_state, self._paths))


def _state(path: Path) -> _State:
    """Return what differs once a file was written, replaced, or given to others; nothing if it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
