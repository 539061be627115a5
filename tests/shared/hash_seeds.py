"""What a program prints under several seeds of Python's hashes: where sets and dicts decide, it differs."""

from __future__ import annotations

import subprocess
import sys

SEEDS = ("1", "2")


def printed_under_each(code: str) -> set[bytes]:
    """Run a program once for each seed, in processes of its own, and return what was printed."""
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.run(command, env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, capture_output=True, check=True)
        for seed in SEEDS
    ]
    return {run.stdout for run in runs}
