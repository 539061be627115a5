"""What overlapping remote calls with compute is worth, and how much of what is possible fxlib captures.

Arms: `blocking`; `paper` (each call split, issued early and awaited late, as in the torch.fx paper); `fxlib` (the
recipe `schedule`); `hand` (an expert's code: coalesced, issued first, awaited last, pushed where the program pushes);
`compute` (the remote results are there already); `bound` (what no order within a step can beat); `pipeline` and
`hand_pipeline` (the recipe's program under `fxlib.pipeline`, and an expert's code that asks for the next step's rows
during this one: in the push's own message where the step pushes; neither under distributed autograd). Metric: seconds
per step; blocks of the arms in random order, within one process and against the same servers. Before, all arms are run
from one state, and losses, weights and servers compared bit by bit, those of `pipeline` in each way of reading ahead;
and `pipeline` chooses its way, as the expert's program is the fastest of several. Servers take `service_ms` for each
lookup, one after another (work), or for each message (`per=call`: latency, which overlaps). `limited_by` is the term
that makes the bound of a cell what it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.grid import memory_limit
from benchmarks.grid.cells import PARTS, QUICK_CELLS, Cell
from benchmarks.grid.figures import rows, summary
from benchmarks.grid.link import limited, unavailable
from benchmarks.grid.measure import SERVERS_PYTHON, Measured
from benchmarks.report import Row, main

ROUNDS, QUICK_ROUNDS = 21, 7


def measured(cells: Sequence[Cell], *, rounds: int) -> list[Row]:
    """Measure every cell, each in a world of its own: a job has no other jobs' objects to collect."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was set up is taken down
    return [figure for cell in cells for each in alone(cell, rounds=rounds) for figure in rows(each)]


def part(cells: Sequence[Cell]) -> Callable[[bool], Sequence[Row]]:
    """Return what measures a part; a quick run has those of its cells that are among the quick ones."""

    def measure(quick: bool) -> Sequence[Row]:
        if quick:
            return measured([each for each in QUICK_CELLS if each in cells], rounds=QUICK_ROUNDS)
        return measured(cells, rounds=ROUNDS)

    return measure


def alone(cell: Cell, *, rounds: int) -> list[Measured]:
    """Measure a cell in a world of its own; none where this machine cannot."""
    mbit_per_s = cell.mbit_per_s
    if mbit_per_s and (problem := unavailable()):
        print(f"skipped the cell at {mbit_per_s} Mbit/s: {problem}", file=sys.stderr)
        return []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        before: Sequence[str] = ()
        environment: Mapping[str, str] = {}
        if mbit_per_s:
            link = stack.enter_context(limited(mbit_per_s, folder))
            before, environment = link.trainer, {**link.environment, SERVERS_PYTHON: str(link.servers_python)}
        asked, found = folder / "cells.json", folder / "found.json"
        asked.write_text(json.dumps({"rounds": rounds, "cells": [asdict(cell)]}))
        command = [*before, sys.executable, "-m", "benchmarks.grid.measure", str(asked), str(found)]
        subprocess.run(command, check=True, env=os.environ | environment)
        return [Measured.from_json(each) for each in json.loads(found.read_text())]


def peak_memory(_: bool = False) -> list[Row]:
    """Observe memory in a process of its own, which says from the start how it takes it from the system."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks.grid.memory_limit", str(found)]
        subprocess.run(command, check=True, env=os.environ | memory_limit.ENVIRONMENT)
        return [Row(**each) for each in json.loads(found.read_text())]


if __name__ == "__main__":
    parts = {name: part(cells) for name, cells in PARTS.items()} | {"memory": peak_memory}
    main("overlap", parts, about="Overlap of remote calls with compute.", summary=summary)
