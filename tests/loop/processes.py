"""A real service and real workers, as processes of a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.workers.cases import alive

ALLOWED = "tests.workers.remote_code"


class Service:
    """`python -m service` on one port and one folder, however often it is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listen = "127.0.0.1:0"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listen

    def start(self) -> None:
        """Start it where it was before, and wait until it is ready."""
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        options = ["--listen", self._listen, "--metrics", "127.0.0.1:0", "--data", str(self._folder / "data")]
        options += ["--ready-file", str(ready), "--lease-seconds", "4"]
        log = (self._folder / "service.log").open("ab")
        self._process = subprocess.Popen([sys.executable, "-m", "service", *options], stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not ready.exists() or not ready.read_text().endswith("\n"):
            assert time.monotonic() < deadline, "the service does not come up"
            time.sleep(0.05)
        self._listen = json.loads(ready.read_text())["listen"]

    def kill(self) -> None:
        """Kill it, as a machine that loses its power does."""
        _end(self._process, signal.SIGKILL)

    def end(self) -> None:
        """End it in order."""
        _end(self._process, signal.SIGTERM)


class Worker:
    """`python -m workers`, with its log."""

    def __init__(self, service: Service, folder: Path, name: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        options = ["--service", service.address, "--name", name, "--allow-module", ALLOWED]
        options += ["--trial-memory-gib", "2", "--host-lock", str(folder / "host.lock")]
        # A mark in the environment of all that it starts, by which leftovers are found.
        environment = {**os.environ, "FXLIB_TEST_MARK": self.mark}
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "workers", *options]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    @property
    def mark(self) -> str:
        """What all processes of this worker carry in their environment."""
        return f"worker-{self.name}-of-{os.getpid()}"

    def kill(self) -> None:
        """Kill the worker itself; what it started must notice."""
        _end(self._process, signal.SIGKILL)

    def end(self) -> None:
        """End it in order."""
        _end(self._process, signal.SIGTERM)

    def left(self, deadline_s: float = 20.0) -> list[int]:
        """Return the processes that are still there, once none is or after a while."""
        deadline = time.monotonic() + deadline_s
        while (found := alive(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


def _end(process: subprocess.Popen[bytes] | None, number: int) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(number)
    if process is not None:
        process.wait(60)
