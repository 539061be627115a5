"""What a run of the tests leaves behind is ended, and the run's status is handed on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

LEAVES = """
import os, subprocess, sys
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # it holds the pipe that this writes to
print(left.pid, flush=True)
os.kill(os.getpid(), 9) if sys.argv[1] == "killed" else os._exit(3)
"""


@pytest.mark.parametrize("how, status", [("killed", 128 + 9), ("ended", 3)])
def test_what_a_command_leaves_behind_ends_with_it(how: str, status: int) -> None:
    command = [sys.executable, "-m", "tests.leave_nothing", sys.executable, "-c", LEAVES, how]
    root = Path(__file__).parents[1]
    ran = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == status
    assert not psutil.pid_exists(int(ran.stdout))
