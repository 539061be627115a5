"""What the trainer's own thread spends on each lookup: its processor time, waiting left out, beside an expert's code.

Servers that answer at once, 26 lookups in a step: in `forward`, and in `push`, training whose lookups' gradients are
pushed. Arms, their blocks in random order, in one process and against the same servers: `fxlib` (the recipe `schedule`
within the step), `pipeline` (the same under `fxlib.pipeline`), `hand` and `hand_pipeline` (an expert's code within the
step, and across it, in the way of asking that is fastest here). Metric: `us` of the thread for each lookup, which is
what its step takes more than one whose remote results are there already.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from benchmarks.grid.arms import Job, Steps, arms, one_by_one
from benchmarks.grid.cells import COMPUTE, FXLIB, HAND, HAND_PIPELINE, MIDDLE, PIPELINE, Cell
from benchmarks.grid.measure import fastest
from benchmarks.grid.recommender import served
from benchmarks.report import Row, main, row
from fxlib.ps.local import local

CELLS: Final = tuple(replace(MIDDLE, service_ms=0.0, mode=mode, conflicts=0.1) for mode in ("forward", "push"))
ROUNDS, QUICK_ROUNDS = 31, 7
STEPS: Final = 40
"""Steps of one arm in a block."""


def measure(quick: bool) -> Sequence[Row]:
    """Measure each cell, all against the same servers."""
    torch.set_num_threads(1)
    with local(served(MIDDLE.servers)):
        return [each for cell in CELLS for each in compare(cell, QUICK_ROUNDS if quick else ROUNDS)]


def compare(cell: Cell, rounds: int) -> Iterator[Row]:
    """Measure all arms of one cell."""
    job = Job.of(cell)
    job.reset_servers()
    made = arms(job)
    programs: dict[str, Steps] = {arm: one_by_one(job, made.steps[arm]) for arm in (COMPUTE, FXLIB)}
    tried = {way: one_by_one(job, step) for way, step in made.tried.items()}
    programs |= {PIPELINE: made.across[PIPELINE], HAND: tried[fastest(tried)]}
    programs[HAND_PIPELINE] = made.tried_across[fastest(made.tried_across)]
    spent: dict[str, list[float]] = {arm: [] for arm in programs}
    order, chance = list(programs), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for arm in order:
            spent[arm].append(seconds_of_thread(programs[arm]))
    for arm in order:
        if arm != COMPUTE:
            of_lookups = zip(spent[arm], spent[COMPUTE], strict=True)
            samples = [1e6 * (whole - compute) / cell.lookups for whole, compute in of_lookups]
            yield row(benchmark="per_lookup", case=cell.case, arm=arm, metric="us", unit="us", samples=samples)
    print(f"{cell.mode}: compute alone takes {1e6 * min(spent[COMPUTE]):.0f} us of a step", file=sys.stderr)


def seconds_of_thread(steps: Steps) -> float:
    """Return the processor time of this thread for one of so many steps."""
    start = time.thread_time()
    deque(steps(STEPS), maxlen=0)
    return (time.thread_time() - start) / STEPS


if __name__ == "__main__":
    main("per_lookup", measure, about="Processor time of the trainer's thread for each lookup.")
