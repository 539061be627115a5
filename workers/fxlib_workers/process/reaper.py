"""Runs a command and leaves nothing of it behind: no process that it started in any way, and no file in its folder.

    python -m fxlib_workers.process.reaper FOLDER ROOT DESCRIPTOR COMMAND...

A worker starts every process of a trial or of a rewrite below a reaper. The reaper adopts the processes that its
descendants orphan (it is a *child subreaper*, see prctl(2)). It ends them all as soon as the command ends, or as soon
as its own standard input does. Only the worker holds the other end of that pipe, so it closes when the worker ends,
even by SIGKILL. A worker that ends the command on purpose first writes a byte; without that byte, the reaper also
deletes ROOT, the worker's own folder. The file DESCRIPTOR, over which command and worker communicate, is passed on to
the command. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from fxlib_workers.process.linux import adopt_orphans

_TIMEOUT_S: Final = 10.0


def main(folder: str, root: str, descriptor: int, command: list[str]) -> int:
    """Run the command until it or standard input ends; return its status, or 128 plus the signal that ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles a terminal's Ctrl-C
    adopt_orphans()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])
    os.close(descriptor)
    signal.signal(signal.SIGTERM, lambda *_: child.kill())
    signal.signal(signal.SIGCHLD, lambda *_: _reap_adopted(child.pid))
    abandoned = False
    try:
        abandoned = _await_end(child)
        status = child.poll()
        return 128 - status if status is not None and status < 0 else status or 0
    finally:
        end_descendants()
        delete(Path(folder))
        if abandoned:
            delete(Path(root))


def end_descendants() -> None:
    """Kill all processes below this one, and those that they orphan in the meantime, until none is left."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        below = psutil.Process().children(recursive=True)
        if not below:
            return
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def delete(folder: Path) -> None:
    """Delete a folder, retrying while another reaper or a process that is about to end is still writing there."""
    deadline = time.monotonic() + _TIMEOUT_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if not os.access(folder.parent, os.W_OK):  # the disk may have become read-only
            return
        time.sleep(0.01)


def children_of_this_process() -> set[int]:
    """Return the ids of the children of this single-threaded process; ended ones count until they are reaped."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _reap_adopted(child: int) -> None:
    """Reap adopted processes that have ended, since nobody else waits for them."""
    for pid in children_of_this_process() - {child}:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _await_end(child: subprocess.Popen[bytes]) -> bool:
    """Wait for the child or the worker to end; return whether the worker ended without writing its byte."""
    process, worker = os.pidfd_open(child.pid), sys.stdin.fileno()
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(worker, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    os.close(process)
    return worker in ready and not os.read(worker, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
