"""What overlapping remote calls with compute is worth: one trainer, two parameter servers, four programs interleaved.

Arms: `blocking`, `fxlib` (the recipe `schedule`), `hand` (an expert's asynchronous code) and `compute` (the remote
results captured beforehand). Metric: seconds per training step; blocks of the arms in random order, within one process
and against the same servers.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import rpc

from benchmarks.programs import SERVERS, Step, servers, steps
from benchmarks.report import Case, Row, main, row
from fxlib import ps
from fxlib.ps.local import local

MOST_LOOKUPS = 26
GRID = tuple(itertools.product((8, MOST_LOOKUPS), (0.0, 0.5, 2.0, 10.0), (256, 1024)))
QUICK_GRID = ((8, 0.0, 256), (8, 2.0, 256), (8, 10.0, 1024), (26, 2.0, 256))
BLOCK_S = 0.1
ROUNDS, QUICK_ROUNDS = 21, 9


def measure(quick: bool) -> Sequence[Row]:
    """Measure every cell of the grid."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    grid = QUICK_GRID if quick else GRID
    with local(servers(MOST_LOOKUPS)):
        for lookups, service_ms, hidden in grid:
            for server in SERVERS:
                rpc.rpc_sync(server, ps.set_service_time, args=(service_ms / 1e3,))
            case: Case = {"lookups": lookups, "servers": len(SERVERS), "service_ms": service_ms, "hidden": hidden}
            rows += cell(case, steps(lookups, hidden), rounds=QUICK_ROUNDS if quick else ROUNDS)
    return rows


def cell(case: Case, programs: Mapping[str, Step], *, rounds: int) -> list[Row]:
    """Run the programs in blocks, in a new random order each round."""
    lengths = {arm: max(1, round(BLOCK_S / block(step, 2))) for arm, step in programs.items()}
    samples: dict[str, list[float]] = {arm: [] for arm in programs}
    order, dice = list(programs), random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for arm in order:
            samples[arm].append(block(programs[arm], lengths[arm]))
    return [
        row(benchmark="overlap", case=case, arm=arm, metric="step_seconds", unit="s", samples=values)
        for arm, values in samples.items()
    ]


def block(step: Step, length: int) -> float:
    """Seconds per step over so many of them."""
    start = time.perf_counter()
    for _ in range(length):
        step()
    return (time.perf_counter() - start) / length


if __name__ == "__main__":
    main("overlap", measure, about="Overlap of remote calls with compute.")
