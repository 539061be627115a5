"""Runs a command and ends every process that it leaves behind, in whatever session that is.

    python -I -S .../fxlib/zoo/reaper.py DESCRIPTOR COMMAND...

It adopts the processes that descendants orphan (it is a *child subreaper*, see prctl(2)), and kills all below it once
the command has ended, it is sent SIGTERM, or its parent has ended. The file DESCRIPTOR is the command's alone. It runs
as a file of its own, so that it imports nothing but Python's library. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def main(descriptor: int, command: list[str]) -> None:
    """Run the command to its end, and end as it does: with its status, or by its signal."""
    libc = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until there is somebody to end
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.posix_spawn(command[0], command, os.environ, setsigmask=[])
    for each in (sys.stdin.fileno(), descriptor):
        os.close(each)

    def end(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    while (ended := os.wait())[0] != child:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_children()
    status = os.waitstatus_to_exitcode(ended[1])
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other disposition
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _end_children() -> None:
    """Kill all children, and those of theirs that this process then adopts, until none is left."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    while listed.exists() and (children := [int(each) for each in listed.read_text().split()]):
        for each in children:
            with contextlib.suppress(PermissionError):  # another user's: whoever started this process waits no longer
                os.kill(each, signal.SIGKILL)
        for each in children:
            os.waitpid(each, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
