"""The images: built where an engine is, and their steps taken as it would, on this machine's own Python and files."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import yaml

from tests.deploy.image_steps import SOURCES
from tests.service.support import eventually, fetch
from tests.shared.real_service import free_port

DOCKER = SOURCES / "deploy" / "docker"
_BUILD_S = 240
"""Less than what `make test` takes for a test that hangs."""

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


pytestmark = pytest.mark.slow
needs_overlays = pytest.mark.skipif(bool(_unavailable()), reason=_unavailable() or "there can be overlays")


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


@contextmanager
def beside(other: int, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command as a second process of the container that a process is in."""
    within = ["nsenter", f"--target={other}", "--mount", "--root", "--wd", "--setuid=10001", "--setgid=10001"]
    environment = psutil.Process(other).environ()
    process = subprocess.Popen([*within, "env", *command], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@needs_overlays
def test_the_service_s_image_serves_shows_itself_and_ends_in_order(tmp_path: Path) -> None:
    addresses = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    with running("service", tmp_path, *addresses) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        assert told, (tmp_path / "said").read_text()
        address = json.loads(told)["metrics"]
        with urllib.request.urlopen(f"http://{address}/readyz", timeout=60) as page:
            assert page.status == 200
        assert psutil.Process(process.pid).uids().effective == 10001
        _see_the_dashboard(process.pid, json.loads(told)["listen"])
        process.terminate()
        assert process.wait(60) == 0


def _see_the_dashboard(service: int, listen: str) -> None:
    """Run the dashboard of the image as Compose does, and look at a page that it has asked the service for."""
    entry_point = yaml.safe_load((DOCKER.parent / "compose.yaml").read_text())["services"]["dashboard"]["entrypoint"]
    address = f"127.0.0.1:{free_port()}"
    with beside(service, *entry_point, "--listen", address, "--service", listen) as dashboard:
        for _ in eventually(100):
            assert dashboard.poll() is None, dashboard.stderr and dashboard.stderr.read()
            with suppress(OSError):
                assert fetch(f"http://{address}/healthz") == "ok\n"
                break
        assert json.loads(fetch(f"http://{address}/jobs.json"))["jobs"] == []


@needs_overlays
@pytest.mark.parametrize("image, words, told", [("worker", [], "--ray-address"), ("zoo", ["run"], "ZOO.toml")])
def test_an_image_says_how_it_is_run(image: str, words: list[str], told: str, tmp_path: Path) -> None:
    with running(image, tmp_path, *words, "--help") as process:
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, (tmp_path / "said").read_text()
    assert told in said


@cache
def _engine() -> tuple[str, str]:
    """The program that builds images here, or why there is none."""
    found = [each for each in ("docker", "podman") if shutil.which(each)]
    for each in found:
        if subprocess.run([each, "info"], capture_output=True, check=False, timeout=30).returncode == 0:
            return each, ""
    return "", f"no daemon answers {' or '.join(found)}" if found else "neither docker nor podman is installed"


@pytest.mark.skipif(bool(_engine()[1]), reason=_engine()[1] or "there is an engine")
@pytest.mark.parametrize("image", sorted(path.stem for path in DOCKER.glob("*.Dockerfile")))
def test_an_engine_builds_the_image_and_runs_it(image: str) -> None:
    engine, name = _engine()[0], f"fxlib-test-{image}"
    build = [engine, "build", "--file", str(DOCKER / f"{image}.Dockerfile"), "--tag", name, str(SOURCES)]
    try:
        built = subprocess.run(build, capture_output=True, text=True, check=False, timeout=_BUILD_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the build takes longer than {_BUILD_S} s; the engine goes on from there the next time")
    assert built.returncode == 0, built.stdout + built.stderr
    run = [engine, "run", "--rm", "--network", "none", "--read-only", "--tmpfs=/tmp", name, "--help"]
    ran = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
