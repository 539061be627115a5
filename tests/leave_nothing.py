"""Runs a command, and ends whatever it leaves behind: servers of tests whose own process has died, for one.

    python -m tests.leave_nothing COMMAND...

Such a process would also keep open what the command writes to, and whoever reads that would wait without end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from fxlib_workers.process.linux import adopt_orphans
from fxlib_workers.process.reaper import end_descendants


def main(command: Sequence[str]) -> int:
    """Run the command to its end; return its status, or 128 plus the signal that ended it."""
    adopt_orphans()
    child = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the command itself
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        ended = -1
        while ended != child.pid:
            ended, status = os.wait()
    finally:
        end_descendants()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
