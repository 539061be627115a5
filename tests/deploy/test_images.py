"""The images' steps, taken as an engine would, on this machine's own Python and files."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.deploy.image_steps import SOURCES

DOCKER = SOURCES / "deploy" / "docker"


OVERLAY = """
mount -t tmpfs probe $0 && mkdir $0/upper $0/work $0/root
mount -t overlay overlay -o lowerdir=/,upperdir=$0/upper,workdir=$0/work $0/root && chroot $0/root true
"""


@cache
def _unavailable() -> str:
    """Why no steps can be taken here, in words; empty if they can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "the steps of an image take root, and `unshare`"
    if find_spec("hatchling") is None:
        return "hatchling is not installed (make install)"
    with TemporaryDirectory() as folder:
        probe = ["unshare", "--mount", "sh", "-c", OVERLAY, folder]
        probed = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"no overlay can be mounted here: {probed.stderr}" if probed.returncode else ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_unavailable()), reason=_unavailable() or "there can be overlays"),
]


@contextmanager
def running(image: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Take the steps of an image, and run its entry point; what the steps say is in the folder's file `said`."""
    (place := folder / "place").mkdir()
    steps = [sys.executable, "-m", "tests.deploy.image_steps", str(DOCKER / f"{image}.Dockerfile"), str(place)]
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            ["unshare", "--mount", *steps, *arguments], cwd=SOURCES, stdout=subprocess.PIPE, stderr=said, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
    assert "does not provide the extra" not in (folder / "said").read_text()


def test_the_service_s_image_serves_and_ends_in_order(tmp_path: Path) -> None:
    addresses = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    with running("service", tmp_path, *addresses) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        assert told, (tmp_path / "said").read_text()
        address = json.loads(told)["metrics"]
        with urllib.request.urlopen(f"http://{address}/readyz", timeout=60) as page:
            assert page.status == 200
        assert psutil.Process(process.pid).uids().effective == 10001
        process.terminate()
        assert process.wait(60) == 0


def test_the_worker_s_image_says_how_it_is_run(tmp_path: Path) -> None:
    with running("worker", tmp_path, "--help") as process:
        told, _ = process.communicate(timeout=200)
        assert process.returncode == 0, (tmp_path / "said").read_text()
    assert "--ray-address" in told
