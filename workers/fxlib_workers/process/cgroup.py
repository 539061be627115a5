"""A cgroup for one job, which bounds the total memory and number of processes that the job uses.

Version 1 or version 2 is used, whichever has the controllers, if this process may make a group: as root, or below a
group that was delegated to its user (systemd's `Delegate=`, and `DelegateSubgroup=` for the worker itself, since a
group of version 2 holds either processes or other groups).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PREFIX: Final = "fxlib"
_REMOVE_S: Final = 5.0
_JOINED_S: Final = 60.0
"""Seconds after its creation by which a group has been joined."""


class CgroupUnavailableError(Exception):
    """No group can be made on this host; the message says why."""


@dataclass(frozen=True, slots=True)
class JobCgroup:
    """The group of one job.

    Attributes:
        folders: its folders, one for each hierarchy: one in version 2, one for each controller in version 1.
    """

    folders: tuple[Path, ...]

    @property
    def joins(self) -> tuple[Path, ...]:
        """The files into which a process writes its id to join the group."""
        return tuple(folder / "cgroup.procs" for folder in self.folders)

    def ran_out(self) -> bool:
        """Return whether the kernel ended a process of the group because the group's memory ran out."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    return dict(line.split() for line in (folder / name).read_text().splitlines())["oom_kill"] != "0"
        return False


def remove_abandoned() -> None:
    """Remove the groups of killed workers: those without processes and with a creator that is gone.

    A creator that this process cannot see may still live in another container. So a group that is too young to have
    been joined for certain is left alone, and the kernel does not remove a group with processes in it.
    """
    with contextlib.suppress(OSError, CgroupUnavailableError):
        for parent in _parents(0, 0):
            for folder in parent.glob(f"{_PREFIX}-*-*"):
                with contextlib.suppress(OSError, ValueError):
                    maker = Path("/proc", str(int(folder.name.split("-")[1])))
                    if not maker.exists() and time.time() - folder.stat().st_mtime > _JOINED_S:
                        folder.rmdir()


@contextlib.contextmanager
def job_cgroup(memory_bytes: int, processes: int) -> Iterator[JobCgroup]:
    """Make a group for the duration of a block, with limits on its total memory and number of processes and threads.

    All processes of the group have ended when the block ends.

    Raises:
        CgroupUnavailableError: no group can be made.
    """
    made: list[Path] = []
    try:
        try:
            name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
            for parent, limits in _parents(memory_bytes, processes).items():
                (folder := parent / name).mkdir()
                made.append(folder)
                for file, value in limits.items():
                    (folder / file).write_text(str(value))
        except OSError as error:
            raise CgroupUnavailableError(f"{error.strerror}: {error.filename}") from error
        yield JobCgroup(tuple(made))
    finally:
        for folder in made:
            _remove(folder)


def _parents(memory_bytes: int, processes: int) -> Mapping[Path, Mapping[str, int]]:
    """Return the folders in which a group is made, with the limits to write there, by file."""
    groups = _own_groups()
    if {"memory", "pids"} <= groups.keys():
        return {
            groups["memory"]: {"memory.limit_in_bytes": memory_bytes},
            groups["pids"]: {"pids.max": processes},
        }
    if "" not in groups:
        raise CgroupUnavailableError("no hierarchy of cgroups is mounted here")
    # Only leaves hold processes, so the group of a job is made beside the worker's, not below it.
    parent = groups[""].parent
    if not _is_delegated(parent):
        raise CgroupUnavailableError("the worker's cgroup is not one that systemd delegated, with Delegate=")
    controllers = (parent / "cgroup.subtree_control").read_text().split()
    if missing := {"memory", "pids"}.difference(controllers):
        (parent / "cgroup.subtree_control").write_text(" ".join(f"+{each}" for each in sorted(missing)))
    return {parent: {"memory.max": memory_bytes, "memory.oom.group": 1, "pids.max": processes}}


def _is_delegated(folder: Path) -> bool:
    """Return whether systemd has delegated a group, and makes no groups there itself."""
    for attribute in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            return os.getxattr(folder, attribute) == b"1"
    return False


def _own_groups() -> dict[str, Path]:
    """Return the folders of this process's groups: by controller in version 1, and by "" in version 2."""
    mounts: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        at = Path(fields.split()[4])
        if kind == "cgroup2":
            mounts[""] = at
        elif kind == "cgroup":
            mounts |= dict.fromkeys(options.split(","), at)
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in mounts:
                folder = mounts[controller] / path.lstrip("/")
                # In a container, a path may be the host's, of which the mount shows only the container's part.
                found[controller] = folder if folder.exists() else mounts[controller]
    return found


def _remove(folder: Path) -> None:
    """Remove a group, whose last processes may be about to end."""
    deadline = time.monotonic() + _REMOVE_S
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
