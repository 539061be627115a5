"""The host's memory, and limits that a process sets for itself and that nothing it runs can raise again."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

import psutil

_HEADROOM: Final = 4096
"""The number of processes and threads that a user may start beyond the current ones; torch and Ray need hundreds."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_MEMORY_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""The files with the limit of a container's memory, in cgroups of version 2 and 1: a number, or "max" for none."""


def host_memory_bytes() -> int:
    """Return the memory in bytes of this host, or of the container that this process is in."""
    total: int = psutil.virtual_memory().total
    for name in _MEMORY_LIMITS:
        try:
            limit = (_CGROUPS / name).read_text().strip()
        except OSError:
            continue
        return total if limit == "max" else min(total, int(limit))
    return total


def limit_files(bytes_: int) -> None:
    """Keep this process, and those that it starts, from writing files of more than `bytes_` bytes, and core dumps.

    A write beyond the limit raises OSError (EFBIG), since Python ignores the signal.
    """
    _lower(resource.RLIMIT_FSIZE, bytes_)
    _lower(resource.RLIMIT_CORE, 0)


def limit_processes() -> None:
    """Limit this process's user to a few thousand more processes and threads than now, which stops a fork bomb.

    The kernel counts all processes of the user. It does not apply this limit to root.
    """
    _lower(resource.RLIMIT_NPROC, _threads_of_user() + _HEADROOM)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (most, most))


def _threads_of_user() -> int:
    user, threads = os.getuid(), 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == user:
            threads += process.info["num_threads"] or 0
    return threads
