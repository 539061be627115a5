"""A child for tests of the fork server: it obeys words on its socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.workers.orphaning_child import ORPHAN


def main(connection: socket.socket, _: object) -> None:
    """Obey until the other end is closed, or a word says to end."""
    while word := connection.recv(100).decode():
        if word == "name":
            connection.sendall(Path("/proc/self/comm").read_bytes().strip())
        if word == "draw":
            import numpy as np

            connection.sendall(str(np.random.random()).encode())  # noqa: NPY002 - the state that a fork would share
        if word == "breed":
            subprocess.run([sys.executable, "-c", ORPHAN], check=True, start_new_session=True)
            connection.sendall(b"bred")
        if word == "exit":
            sys.exit(7)
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
