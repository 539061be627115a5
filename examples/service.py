"""A service with a worker beside it, for as long as an example runs."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY = "fxlib: the service is at "
END_S = 20.0
PR_SET_PDEATHSIG = 1


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """Run `fxlib serve` on free ports; yield its address, and end it and all that it started."""
    command = [sys.executable, "-m", "fxlib.cli", "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--data", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread so far
    )
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if line.startswith(READY)), None)
        if ready is None:
            raise SystemExit("the service did not start: see its messages above")
        print(ready.strip(), flush=True)
        yield ready.removeprefix(READY).split(",")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def die_with_parent() -> None:
    """Let the kernel end this process when its parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
