"""The memory of a trial on one host, bounded as a whole: by the kernel where it allows cgroups, else by a watchdog.

Each process has a limit of its own besides, beyond which it cannot allocate (`actor`). Many processes that each stay
below theirs could take all that the host has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from fxlib_workers.process.cgroup import CgroupUnavailableError, JobCgroup, job_cgroup
from fxlib_workers.process.containment import Containment, Part
from fxlib_workers.process.limits import host_memory_bytes

_LIBRARIES_BYTES: Final = 256 << 20
"""What the libraries take in each process, for which no graph is to blame."""

_SHARE: Final = 0.75
"""The part of a host's memory that a trial may take, unless the operator says otherwise."""

_POLL_S: Final = 0.25


class TrialMemory:
    """Bounds what processes of one trial take together on this host.

    Made within the event loop that the watchdog is to run in.

    Args:
        limit_bytes: what they may take on top of what the libraries take; 0 for three quarters of the host's memory.
        processes: their number.
        policy: what they are kept from.

    Attributes:
        policy: the same, with the cgroup that they join, if there is one.
    """

    def __init__(self, limit_bytes: int, processes: int, policy: Containment) -> None:
        self._limit_bytes = limit_bytes or round(_SHARE * host_memory_bytes())
        self._most_bytes = self._limit_bytes + processes * _LIBRARIES_BYTES
        self._open = contextlib.ExitStack()
        self._group = self._cgroup(processes * policy.threads) if Part.MEMORY in policy.parts else None
        self.policy = replace(policy, cgroup=self._group.joins) if self._group else policy
        self._pids: list[int] = []
        self._inherited_bytes = 0  # what each shares with the process that forked it
        self._over = False
        self._watchdog = None if self._group else asyncio.create_task(self._watch())

    def _cgroup(self, threads: int) -> JobCgroup | None:
        with contextlib.suppress(CgroupUnavailableError):
            return self._open.enter_context(job_cgroup(self._most_bytes, threads))
        return None

    def add(self, pid: int) -> None:
        """Count a process that was just forked, and all below it."""
        self._pids.append(pid)
        self._inherited_bytes = max(self._inherited_bytes, _resident_bytes(pid))

    def ran_out(self) -> str:
        """Return what was wanted, if it was more than there may be; "" otherwise."""
        if not (self._over or (self._group is not None and self._group.ran_out())):
            return ""
        return f"its processes on one host wanted more than {self._limit_bytes} bytes together"

    async def close(self) -> None:
        """Stop watching, and remove the cgroup, whose processes have ended."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        await asyncio.to_thread(self._open.close)

    async def _watch(self) -> None:
        """End all processes once they take too much. A process that allocates fast is ahead by a moment's worth."""
        while not self._over:
            await asyncio.sleep(_POLL_S)
            resident = [_resident_bytes(pid) for each in self._pids for pid in _with_descendants(each)]
            taken = sum(max(0, each - self._inherited_bytes) for each in resident)
            if taken > self._most_bytes:
                self._over = True
                for pid in self._pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _with_descendants(pid: int) -> Iterator[int]:
    """Yield a process's id and those of all below it. Other processes are not looked at, since that takes longer."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in children.read_text().split():
                yield from _with_descendants(int(child))


def _resident_bytes(pid: int) -> int:
    """Return the memory of a process that no file holds; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
