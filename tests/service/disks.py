"""Disks that fill up: a small file system of its own, where this user may mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAY_MOUNT = os.geteuid() == 0 and shutil.which("mount") is not None


class SmallDisk:
    """A file system of a few MiB, which a ballast fills."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self, *, but: int = 0) -> None:
        """Leave `but` bytes of room."""
        room = os.statvfs(self.path)
        with self._ballast.open("ab", buffering=0) as file:
            left = room.f_bavail * room.f_frsize - but
            try:
                while left > 0:
                    left -= file.write(bytes(min(left, 1 << 16)))
            except OSError:
                return

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, *, mib: int = 16) -> Iterator[SmallDisk]:
    """Mount one for the length of the block; only root may."""
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "fxlib-test", str(path)], check=True)
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
