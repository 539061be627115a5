"""`fxlib serve` starts a service and a worker, keeps them, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fxlib

WORKER = """
import os, pathlib, signal, sys, time
log = pathlib.Path(os.environ["WORKER_LOG"])
with log.open("a") as file:
    file.write(f"{os.getpid()} {' '.join(sys.argv[1:])}\\n")
if os.environ.get("WORKER_DIES"):
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A stand-in for the package `workers`, whose starts are noted here."""
    package = tmp_path / "stand-in" / "workers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(WORKER)
    return tmp_path / "workers.log"


@contextmanager
def serve(tmp_path: Path, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "fxlib.cli", "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--data", str(tmp_path / "data"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "stand-in"), **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    found = re.search(r"the service is at (\S+), its metrics at (http://\S+/metrics)", process.stdout.readline())
    assert found is not None
    return found[1]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


def starts(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_service_and_worker(tmp_path: Path, log: Path, number: signal.Signals) -> None:
    with serve(tmp_path, "--allow-module", "my.ps", WORKER_LOG=str(log)) as process:
        where = address(process)
        until(lambda: bool(starts(log)))
        assert starts(log)[0].endswith(f"--service {where} --allow-module my.ps")
        with fxlib.connect(where) as client:
            assert client.jobs() == []
        pids = children(process.pid)
        assert len(pids) == 2
        process.send_signal(number)
        assert process.wait(30) == 0
        assert all(gone(pid) for pid in pids)


def test_no_worker_is_started_when_told_so(tmp_path: Path, log: Path) -> None:
    with serve(tmp_path, "--no-worker", WORKER_LOG=str(log)) as process:
        address(process)
        assert len(children(process.pid)) == 1
        assert starts(log) == []


def test_a_worker_that_dies_is_replaced(tmp_path: Path, log: Path) -> None:
    with serve(tmp_path, WORKER_LOG=str(log)) as process:
        address(process)
        until(lambda: len(starts(log)) == 1)
        os.kill(int(starts(log)[0].split()[0]), signal.SIGKILL)
        until(lambda: len(starts(log)) == 2)
        assert process.poll() is None


def test_a_service_that_dies_ends_the_worker_and_the_command(tmp_path: Path, log: Path) -> None:
    with serve(tmp_path, WORKER_LOG=str(log)) as process:
        address(process)
        until(lambda: bool(starts(log)))
        worker = int(starts(log)[0].split()[0])
        [service] = set(children(process.pid)) - {worker}
        os.kill(service, signal.SIGKILL)
        assert process.wait(30) == 1
        assert gone(worker)
        assert process.stderr is not None
        assert "fxlib: the service: it ended with exit code -9" in process.stderr.read()


def test_killed_it_takes_service_and_worker_along(tmp_path: Path, log: Path) -> None:
    with serve(tmp_path, WORKER_LOG=str(log)) as process:
        address(process)
        until(lambda: bool(starts(log)))
        pids = children(process.pid)
        process.kill()
        until(lambda: all(gone(pid) for pid in pids))


def test_an_address_in_use_is_an_error_not_a_wait(tmp_path: Path) -> None:
    with serve(tmp_path, "--no-worker") as first:
        taken = address(first)
        (tmp_path / "second").mkdir()
        with serve(tmp_path / "second", "--no-worker", "--listen", taken) as second:
            assert second.wait(30) == 1
            assert second.stderr is not None
            assert "see its words above" in second.stderr.read()


def test_a_client_authority_needs_workers_of_its_own(tmp_path: Path) -> None:
    with serve(tmp_path, "--client-ca", "ca.pem") as process:
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert "Say --no-worker, and start it with fxlib worker." in process.stderr.read()
