"""A reaper leaves nothing of its command, and ends as the command did."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fxlib.zoo import reaper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it adopts processes by prctl(2)")

DAEMON = "setsid sh -c 'sleep 1000 & echo $! > pid; sleep 1000' & while [ ! -s pid ]; do sleep 0.01; done; "


def reaped(folder: Path, script: str) -> list[str]:
    """The command of a reaper, in which a daemon writes its id to a file; the program, if it starts one, ends later."""
    return [sys.executable, "-I", "-S", reaper.__file__, "1", "/bin/sh", "-c", f"cd {folder}; {DAEMON}{script}"]


def daemon(folder: Path) -> psutil.Process:
    limit = time.monotonic() + 60
    while not (path := folder / "pid").exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return psutil.Process(int(path.read_text()))


@pytest.mark.parametrize("script, status", [("exit 3", 3), ("kill -ABRT $$", -signal.SIGABRT)])
def test_a_daemon_ends_with_its_command(tmp_path: Path, script: str, status: int) -> None:
    ran = subprocess.run(reaped(tmp_path, script), check=False, stdin=subprocess.DEVNULL)
    assert ran.returncode == status
    with pytest.raises(psutil.NoSuchProcess):
        daemon(tmp_path)


def test_command_and_daemon_end_at_sigterm(tmp_path: Path) -> None:
    process = subprocess.Popen(reaped(tmp_path, "sleep 1000"), stdin=subprocess.DEVNULL)
    below = [daemon(tmp_path), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    assert process.wait(60) == -signal.SIGKILL
    assert not any(each.is_running() for each in below)


def test_command_and_daemon_end_with_whoever_started_the_reaper(tmp_path: Path) -> None:
    program = f"import subprocess; subprocess.run({reaped(tmp_path, 'sleep 1000')!r}, stdin=subprocess.DEVNULL)"
    starter = subprocess.Popen([sys.executable, "-I", "-S", "-c", program])
    below = [daemon(tmp_path), *psutil.Process(starter.pid).children(recursive=True)]
    starter.kill()
    starter.wait()
    _, left = psutil.wait_procs(below, timeout=60)
    assert left == []
