"""Launchers, service and workers are rolled out one after the other: any two of two releases work together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fxlib
from tests.shared.released import python_of_the_release

pytestmark = [pytest.mark.cluster, pytest.mark.own_cluster]

LAUNCHER = Path(__file__).with_name("one_release_apart.py")


@contextmanager
def running(python: Path, log: Path, *module_and_options: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as file:
        # Not in this checkout, from where Ray would import.
        command = [str(python), "-P", "-m", *module_and_options]
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=log.parent)
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(100) == 0, log.read_text()


@contextmanager
def service(python: Path, folder: Path) -> Iterator[str]:
    folder.mkdir()
    ready = folder / "ready"
    options = ["--data", str(folder / "data"), "--ready-file", str(ready)]
    addresses = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    with running(python, folder / "log", "fxlib_service", *options, *addresses) as process:
        while not ready.exists():
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield json.loads(ready.read_text())["listen"]


@contextmanager
def worker(python: Path, address: str, log: Path) -> Iterator[None]:
    with running(python, log, "fxlib_workers", "--service", address, "--host-lock", str(log.with_suffix(".lock"))):
        yield


def check_launched(python: Path, address: str, name: str) -> None:
    """Launch a model, and check what the launcher says that it was told."""
    ran = subprocess.run(
        [str(python), "-P", str(LAUNCHER), address, name],
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    assert (told["from"] == fxlib.__file__) == (str(python) == sys.executable)
    assert told["decision"] == "adopt", told
    assert told["gain"] > 0.02
    assert told["calls"].count("moved") > 1
    assert told["again"] == [True, "adopt", told["gain"]]
    assert told["job"] == ["succeeded", name]
    assert "done" in told["phases"]


@pytest.mark.timeout(600)
def test_a_launcher_a_service_and_a_worker_of_two_releases_adopt_a_faster_module(tmp_path: Path) -> None:
    releases = {"old": python_of_the_release(tmp_path), "new": Path(sys.executable)}

    def check(here: str, there: str) -> None:
        folder = tmp_path / f"{here} service"
        with service(releases[here], folder) as address, worker(releases[there], address, folder / "worker.log"):
            check_launched(releases["new"], address, "by a new launcher")
            check_launched(releases["old"], address, "by an old launcher")

    with ThreadPoolExecutor() as threads:  # what they wait for, they wait for side by side
        list(threads.map(check, ("new", "old"), ("old", "new")))
