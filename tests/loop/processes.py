"""A real service and real workers, as processes of a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import psutil
from torch import nn

from fxlib.client import Client
from fxlib.client.blobs import upload
from fxlib.client.connection import Deadline
from fxlib.client.request import Question, captured_of, prepare
from fxlib.errors import RemoteError
from fxlib.spec.job import Event
from fxlib.spec.workload import Workload
from fxlib_workers.process.child import FOLDER
from tests.shared.forked import Module
from tests.workers.cases import alive

ALLOWED = "tests.workers.remote_code"
MARK = "FXLIB_TEST_MARK"
_BUDGET_S = 6.0
"""Long enough for whoever wants to interfere with a trial, and with no time for a profile."""


class Service:
    """`python -m fxlib_service` on one port and one folder, however often it is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = "127.0.0.1:0"
        """Where it listens."""
        self.start()

    def start(self) -> None:
        """Start it where it was before, and wait until it is ready."""
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        options = ["--listen", self.address, "--metrics", "127.0.0.1:0", "--data", str(self._folder / "data")]
        options += ["--ready-file", str(ready), "--lease-seconds", "6"]
        self._process = Module("fxlib_service", *options, log=self._folder / "service.log")
        self.address = json.loads(self._process.until_written(ready))["listen"]

    def kill(self) -> None:
        """Kill it, as a machine that loses its power does."""
        self._process.end(signal.SIGKILL)

    def end(self) -> None:
        """End it in order."""
        self._process.end()


class Worker:
    """`python -m fxlib_workers`, with its log."""

    def __init__(self, service: Service, folder: Path, name: str, *, modules: Sequence[str] = (ALLOWED,)) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        options = ["--service", service.address, "--name", name]
        options += [word for module in modules for word in ("--allow-module", module)]
        options += ["--keep-env", MARK, "--trial-memory-gib", "2", "--host-lock", str(folder / "host.lock")]
        # A mark in the environment of all that it starts, by which leftovers are found.
        with mock.patch.dict(os.environ, {MARK: self.mark}):
            self._process = Module("fxlib_workers", *options, log=self.log)

    @property
    def mark(self) -> str:
        """What all processes that this worker starts carry in their environment."""
        return f"worker-{self.name}-of-{os.getpid()}"

    def folder(self) -> Path:
        """Return where it keeps its files, as the processes that it started know."""
        environment = psutil.Process(self._process.pid).children()[0].environ()
        return Path(environment[FOLDER]).parent

    def kill(self) -> None:
        """Kill the worker itself; what it started must notice."""
        self._process.end(signal.SIGKILL)

    def end(self) -> None:
        """End it in order."""
        self._process.end()

    def left(self, deadline_s: float = 60.0) -> list[int]:
        """Return the processes that are still there, once none is or after a while."""
        deadline = time.monotonic() + deadline_s
        while (found := alive(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


def submit(client: Client, model: nn.Module, workload: Workload, step_timeout_s: float = 60.0) -> str:
    """Hand a job in, as a launcher that does not wait for the answer; return its id."""
    question = Question(fresh=True)
    prepared = prepare(captured_of(model, workload, question), workload, question)
    prepared.request.trial.step_timeout_s = step_timeout_s
    prepared.request.trial.budget_s = _BUDGET_S
    upload(client._connection, prepared.blobs, Deadline(100))
    return client._connection.jobs.Optimize(prepared.request, timeout=100).job.id


def until(client: Client, job_id: str, said: str, deadline_s: float = 200.0) -> None:
    """Wait for an event of the job whose phase is so, or whose message begins so."""
    seen, ended, events = threading.Event(), threading.Event(), list[Event]()

    def listen(event: Event) -> None:
        events.append(event)
        if event.phase == said or event.message.startswith(said):
            seen.set()

    def watch() -> None:
        with contextlib.suppress(RemoteError):  # the test is over
            client.watch(job_id, listen)
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    deadline = time.monotonic() + deadline_s
    while not seen.wait(0.1):
        assert not ended.is_set(), [event.message for event in events]
        assert time.monotonic() < deadline, [event.message for event in events]
