"""One world of servers, in a process of its own: all cells that are measured against it.

`python -m benchmarks.grid.world CELLS FOUND`: files in JSON, the first read and the second written.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.grid.cells import Cell
from benchmarks.grid.measure import Measured, measure
from benchmarks.grid.recommender import served
from fxlib.ps.local import local

PR_SET_PDEATHSIG = 1
"""Of `prctl`, as linux/prctl.h has it."""
SERVERS_PYTHON = "FXLIB_BENCH_SERVERS_PYTHON"
"""What to start server processes with, where that is not this Python."""


def measured(cells: Sequence[Cell], *, rounds: int) -> list[Measured]:
    """Start the servers, and measure cell by cell."""
    torch.set_num_threads(1)
    if interpreter := os.environ.get(SERVERS_PYTHON):
        multiprocessing.set_executable(interpreter)
    found = []
    with local(served(cells[0].servers)):
        for cell in cells:
            found.append(measure(cell, rounds=rounds))
            print(progress(found[-1]), file=sys.stderr, flush=True)
    return found


def progress(found: Measured) -> str:
    """Return one cell for a person who waits."""
    case = " ".join(f"{key}={value}" for key, value in found.cell.case.items())
    medians = "  ".join(f"{arm} {1e3 * sorted(each)[len(each) // 2]:.2f}" for arm, each in found.step_s.items())
    said = "  ".join(f"{arm} {1e3 * each:.2f}" for arm, each in found.predicted_s.items())
    return f"{case}: {medians} ms (by hand: {found.hand}); predicted {said}  bound {1e3 * found.bound_s:.2f} ms"


def end_with_parent() -> None:
    """Have the system kill this process when the one that started it is gone, however it went."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Do as the command line says."""
    end_with_parent()
    cells, out = map(Path, sys.argv[1:3])
    asked = json.loads(cells.read_text())
    found = measured([Cell(**each) for each in asked["cells"]], rounds=asked["rounds"])
    out.write_text(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    main()
