"""The parts of a run: a service, workers and launchers as processes, which are killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Self

import psutil

from benchmarks.kill_parts import wall_clock
from fxlib_service.blobs.folder import FolderBlobStore
from fxlib_workers.rewrite.sandbox import REWRITING
from tests.service.disks import MAY_MOUNT, SmallDisk, small_disk
from tests.workers.cases import alive

_MARK: Final = "FXLIB_KILLS_MARK"
_STAND_IN: Final = "FXLIB_KILLS_STAND_IN"
_WORKERS: Final = 2
_LAUNCHERS: Final = 2
_DISK_MIB: Final = 256
_NOT_OF_WORKERS: Final = "ballast"
"""How the name of a file in their folder begins that is not theirs: what fills the disk."""
_ENDED: Final = ("succeeded", "failed", "cancelled")
_TICK_S: Final = 0.1
_STARTING: Final = 0.1
"""How often a process may be killed while it is starting."""

UP: Final = "FXLIB_KILLS_UP"
"""The environment variable that names the file that a part writes once it is at work."""

HOUR_S: Final = 3600.0
JUMPS_S: Final = (0.0, HOUR_S, -HOUR_S, 24 * HOUR_S, -24 * HOUR_S, 400 * 24 * HOUR_S, -400 * 24 * HOUR_S)
"""Seconds by which the clock is set ahead of the real one, at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run has left.

    Attributes:
        asked: requests that launchers made.
        answered: jobs that ended with an answer that was measured.
        unmeasured: jobs whose answer says that a process of the trial, or the rewrite, was killed too often.
        given_up: jobs whose workers were lost three times in a row, after which the service gives up, as it says.
        lost: requests that have no job, or whose job did not end, or ended in another way.
        doubled: jobs beyond one for a request, and ends or answers beyond one for a job.
        leaked_leases: jobs that still run although no worker is there.
        leaked_processes: processes that are left when all was ended.
        leaked_files: files of workers, and unfinished or damaged ones of the service.
    """

    asked: int
    answered: int
    unmeasured: int
    given_up: int
    lost: int
    doubled: int
    leaked_leases: int
    leaked_processes: int
    leaked_files: int


@dataclass(slots=True, kw_only=True)
class Faults:
    """How often each part was killed, how often a disk was filled, and how often the clock was set."""

    kills: Counter[str] = field(default_factory=Counter)
    disks: int = 0
    jumps: int = 0


class Part:
    """One process, started again whenever it has ended."""

    def __init__(self, command: Sequence[str], up: Path, log: Path, environment: dict[str, str]) -> None:
        self._command, self._up, self._log, self._environment = command, up, log, environment
        self.done = False
        self.start()

    def start(self) -> None:
        """Start the process."""
        self._up.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command], stdout=log, stderr=log, env=self._environment
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def up(self) -> bool:
        """Whether the process is at work, and not starting."""
        return self._up.exists() and not self.done

    def attend(self) -> None:
        """Start the process again if it was killed, or failed; one that ended in order is done."""
        code = self._process.poll()
        if code is not None and not self.done:
            self.done = code == 0
            if not self.done:
                self.start()

    def end(self) -> None:
        """End the process in order, and wait for it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait(120)


class World:
    """All parts of a run.

    Args:
        folder: the folder for everything that the run writes.
        stand_in: whether trials are stood in for; otherwise they run on Ray.
        seed: the seed of everything that is random.
    """

    def __init__(self, folder: Path, *, stand_in: bool, seed: int) -> None:
        self.faults = Faults()
        self._folder = folder
        self._random = random.Random(seed)
        self._mark = f"{folder.name}-{os.getpid()}"
        self._clock = folder / "clock"
        self._open = ExitStack()
        self._disks = self._open.enter_context(_disks(folder))
        for name in ("run", "data/service", "w"):
            (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        wall_clock.set_ahead(self._clock, 0.0)
        self._stop = threading.Event()
        address = f"127.0.0.1:{_free_port()}"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FXLIB_RUNTIME_DIR": str(folder / "run"),
            wall_clock.FILE: str(self._clock),
            _MARK: self._mark,
            **({_STAND_IN: "1"} if stand_in else {}),
        }
        data = ["--data", str(folder / "data" / "service"), "--listen", address, "--metrics", "127.0.0.1:0"]
        service = ["benchmarks.kill_parts.service", *data, "--lease-seconds", "6", "--reserve-bytes", str(8 << 20)]
        service += ["--ready-file", str(folder / "service.up")]
        self.service = Part(service, folder / "service.up", folder / "service.log", environment)
        own = {**environment, "TMPDIR": str(folder / "w")}
        self.workers = [
            Part(
                [
                    *("benchmarks.kill_parts.worker", "--service", address, "--name", f"w{number}"),
                    *("--keep-env", "FXLIB_KILLS_*", "--trial-memory-gib", "2", "--host-lock", str(folder / "lock")),
                ],
                folder / f"w{number}.up",
                folder / f"worker{number}.log",
                {**own, UP: str(folder / f"w{number}.up")},
            )
            for number in range(_WORKERS)
        ]
        self.launchers = []
        for number in range(_LAUNCHERS):
            (folder / f"launcher{number}").mkdir()
            asking = ["benchmarks.kill_parts.launcher", address, str(folder / f"launcher{number}")]
            up = folder / f"launcher{number}.up"
            self.launchers.append(Part(asking, up, folder / f"launcher{number}.log", {**environment, UP: str(up)}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for part in [*self.launchers, *self.workers, self.service]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                part.end()
        self._open.close()

    def wait(self, seconds: float) -> None:
        """Let time pass, while what has died is started again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for part in (self.service, *self.workers, *self.launchers):
                part.attend()
            time.sleep(_TICK_S)

    def first_job_s(self, most: float) -> float:
        """Wait until a job has ended, while nothing is killed, and return the seconds that it took.

        Raises:
            TimeoutError: none ends in time.
        """
        began = end = time.monotonic()
        while not self._ended():
            if not list(self._folder.glob("launcher*/*.job")):
                began = time.monotonic()  # all are starting
            if time.monotonic() - end > most:
                raise TimeoutError(f"no job ends within {most:g} s, although nothing was killed")
            self.wait(_TICK_S)
        return time.monotonic() - began

    def kill_one(self) -> None:
        """Kill a process of a part that is chosen at random among those that are up, now and then of one that starts.

        While all are starting, wait.
        """
        while not (victims := self._victims(starting=self._random.random() < _STARTING)):
            self.wait(1.0)
        name = self._random.choice(sorted(victims))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._random.choice(victims[name]), signal.SIGKILL)
            self.faults.kills[name] += 1

    def fill_a_disk(self, seconds: float) -> None:
        """Fill the disk of the service, or that of the workers, for a while."""
        if not self._disks:
            return
        disk = self._random.choice(self._disks)
        disk.fill()
        self.faults.disks += 1
        timer = threading.Timer(seconds, disk.clear)
        timer.daemon = True
        timer.start()

    def set_the_clock(self) -> None:
        """Set the clock ahead or back."""
        wall_clock.set_ahead(self._clock, self._random.choice(JUMPS_S))
        self.faults.jumps += 1

    def settle(self, deadline_s: float) -> None:
        """Let the launchers ask no more, and wait until all that they asked has ended."""
        for disk in self._disks:
            disk.clear()
        for number in range(_LAUNCHERS):
            (self._folder / f"launcher{number}" / "enough").touch()
        end = time.monotonic() + deadline_s
        while not all(part.done for part in self.launchers) and time.monotonic() < end:
            self.wait(1.0)
        for part in [*self.workers, self.service]:
            part.end()

    def findings(self) -> Findings:
        """Look at what is left, once all has ended."""
        requests = sorted(self._folder.glob("launcher*/*.request"))
        ended = {path.with_suffix(""): json.loads(path.read_text())["job"] for path in self._ended()}
        data = self._folder / "data" / "service"
        with contextlib.closing(sqlite3.connect(data / "service.sqlite")) as db:
            jobs = {row[0]: row[1:] for row in db.execute("SELECT id, state, failure_code FROM jobs")}
            ends = Counter(name for name, state in db.execute("SELECT job_id, state FROM events") if state in _ENDED)
            results = dict(db.execute("SELECT job_id, body FROM payloads WHERE kind = 'result'"))
        measured = {name for name, body in results.items() if b"FASTER" in body}
        good = [path for path in requests if ended.get(path.with_suffix("")) in jobs]
        states = {path: jobs[ended[path.with_suffix("")]] for path in good}
        given_up = sum(failure == "WORKER_LOST" for _, failure in states.values())
        succeeded = [ended[path.with_suffix("")] for path, (state, _) in states.items() if state == "succeeded"]
        with_answer = [each for each in succeeded if each in results]
        return Findings(
            asked=len(requests),
            answered=sum(each in measured for each in with_answer),
            unmeasured=sum(each not in measured for each in with_answer),
            given_up=given_up,
            lost=len(requests) - len(with_answer) - given_up,
            doubled=max(0, len(jobs) - len(requests)) + sum(count - 1 for count in ends.values()),
            leaked_leases=sum(state == "running" for state, _ in jobs.values()),
            leaked_processes=len(_left(self._mark)),
            leaked_files=len(self._leaked(data)),
        )

    def _ended(self) -> list[Path]:
        return sorted(self._folder.glob("launcher*/*.ended"))

    def _leaked(self, data: Path) -> list[Path]:
        blobs = FolderBlobStore(data)
        rotten = [path for path in data.glob("blobs/??/*") if not blobs.verify(path.name)]
        half = [*data.glob("partial/*"), *data.glob("*.part")]
        of_workers = [path for path in (self._folder / "w").iterdir() if not path.name.startswith(_NOT_OF_WORKERS)]
        leaked = [*rotten, *half, *of_workers]
        for path in leaked:
            print(f"leaked: {path.relative_to(self._folder)}", file=sys.stderr)
        return leaked

    def _victims(self, *, starting: bool) -> dict[str, list[int]]:
        """Return the ids of the processes that may be killed now, by part; those that are starting, too, if asked."""
        found = {
            name: [part.pid for part in parts if part.up or (starting and not part.done)]
            for name, parts in (("service", [self.service]), ("worker", self.workers), ("launcher", self.launchers))
        }
        for worker in self.workers:
            with contextlib.suppress(psutil.Error):
                for each in psutil.Process(worker.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if name := _name(each.name(), each.cmdline()):
                            found.setdefault(name, []).append(each.pid)
        return {name: pids for name, pids in found.items() if pids}


def _name(name: str, command: Sequence[str]) -> str:
    """Return what part of a worker a process is; "" if it is none that a run kills."""
    if "fxlib_workers.process.reaper" in command:
        return "reaper"
    if REWRITING in command:  # the fork server's command line is that of its children, too
        return "rewrite" if name == "rewrite" else "fork server"
    if {"fxlib_workers.trial", "benchmarks.kill_parts.trial"} & set(command):
        return "trial driver"
    if any(each.startswith("fxlib_workers.trial.answer_calls") for each in command):
        return "trial fork server" if name.startswith("python") else "trial process"
    return "raylet" if command and command[0].endswith("/raylet") else ""


def _left(mark: str, deadline_s: float = 60.0) -> list[int]:
    """Return the processes that are still there, once none is or after a while."""
    deadline = time.monotonic() + deadline_s
    while (found := alive(mark)) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    return found


@contextmanager
def _disks(folder: Path) -> Iterator[list[SmallDisk]]:
    """Give the service and the workers a small disk each; without the right to mount, there is none to fill."""
    with ExitStack() as mounted:
        names = ("data", "w") if MAY_MOUNT else ()
        yield [mounted.enter_context(small_disk(folder / name, mib=_DISK_MIB)) for name in names]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def world(*, stand_in: bool, seed: int = 0, folder: Path | None = None) -> Iterator[World]:
    """Start all parts for the length of the block, in `folder`, which is kept, or in one that is deleted."""
    with ExitStack() as opened:
        if folder is None:
            folder = Path(opened.enter_context(TemporaryDirectory(prefix="k")))
        folder.mkdir(parents=True, exist_ok=True)
        yield opened.enter_context(World(folder, stand_in=stand_in, seed=seed))
