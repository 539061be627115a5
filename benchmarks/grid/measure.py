"""One cell measured in a process of its own: blocks of its arms, interleaved, against the same servers.

`python -m benchmarks.grid.measure CELLS FOUND`: files in JSON, the first read and the second written.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.grid.arms import Job, Steps, arms, check, one_by_one
from benchmarks.grid.cells import HAND, HAND_PIPELINE, PIPELINE, Cell
from benchmarks.grid.recommender import served
from benchmarks.report import Case
from fxlib.pipeline.choice import InTurn, MeasuredChoice
from fxlib.pipeline.module_ahead import ahead_of
from fxlib.ps.local import local

Name = TypeVar("Name", bound=str)

BLOCK_S = 0.1
TRIED_ROUNDS = 5
CHOOSING_STEPS = 100
"""Steps within which a pipeline has chosen its way, before the clock starts: as the expert's programs are chosen."""
AHEAD = frozenset({PIPELINE, HAND_PIPELINE})
"""Arms in whose steps each finds what the one before has asked for: but the first, which is before the clock starts."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one cell gave: seconds per step by arm, one per round, in the order of the rounds."""

    cell: Cell
    step_s: Mapping[str, list[float]]
    hand: str
    """The fastest of an expert's programs."""
    predicted_s: Mapping[str, float]
    """Seconds per step by arm, as the cost model had it."""
    bound_s: Mapping[str, float]
    """Seconds of a step that no schedule can beat, and of a loop that knows its next batch."""
    limits: Mapping[str, str]
    """What makes these steps no shorter, by bound."""

    @property
    def case(self) -> Case:
        """What rows say of the cell, and the term of the lowest bound that keeps its step from being shorter."""
        lowest = min(self.limits, key=self.bound_s.__getitem__, default="")
        return {**self.cell.case, "limited_by": self.limits.get(lowest, "")}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Measured:
        """Read what `dataclasses.asdict` made of one."""
        return cls(**{**given, "cell": Cell(**given["cell"])})


def measure(cell: Cell, *, rounds: int) -> Measured:
    """Check that all arms compute the same, then time them."""
    job = Job.of(cell)
    job.reset_servers()
    found = arms(job)
    steps = {arm: one_by_one(job, step) for arm, step in found.steps.items()} | dict(found.across)
    tried = {way: one_by_one(job, step) for way, step in found.tried.items()}
    by_hand = {f"{HAND} ({way})": each for way, each in tried.items()}
    by_hand |= {f"{HAND_PIPELINE} ({way})": each for way, each in found.tried_across.items()}
    ahead = ahead_of(found.ahead)
    ahead.choose_by(InTurn)  # so that every way is compared
    check(job, {**steps, **by_hand})
    ahead.choose_by(MeasuredChoice)
    best = fastest(tried)
    steps[HAND] = tried[best]
    if found.tried_across:
        steps[HAND_PIPELINE] = found.tried_across[fastest(found.tried_across)]
    if PIPELINE in steps:
        deque(steps[PIPELINE](CHOOSING_STEPS), maxlen=0)
    step_s = interleaved(steps, rounds=rounds)
    return Measured(
        cell=cell, step_s=step_s, hand=best, predicted_s=found.predicted_s, bound_s=found.bound_s, limits=found.limits
    )


def fastest(programs: Mapping[Name, Steps]) -> Name:
    """Return which of an expert's programs is fastest here."""
    samples = interleaved(programs, rounds=TRIED_ROUNDS)
    return min(samples, key=lambda way: statistics.median(samples[way]))


def interleaved(
    programs: Mapping[Name, Steps], *, rounds: int, ahead: Collection[str] = AHEAD
) -> dict[Name, list[float]]:
    """Run the programs in blocks, in a new random order each round; return seconds per step, round by round.

    Args:
        programs: loops, by arm.
        rounds: the number of rounds.
        ahead: arms whose first step is left out, since it is the only one for which nothing was asked ahead.
    """
    lengths = {arm: max(1, round(BLOCK_S / block(steps, 2))) for arm, steps in programs.items()}
    samples: dict[Name, list[float]] = {arm: [] for arm in programs}
    order, dice = list(programs), random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for arm in order:
            samples[arm].append(block(programs[arm], lengths[arm], fills=arm in ahead))
    return samples


def block(steps: Steps, length: int, *, fills: bool = False) -> float:
    """Seconds per step over so many of them; `fills`: behind one that fills a pipeline."""
    loop = iter(steps(length + fills))
    if fills:
        next(loop)
    start = time.perf_counter()
    deque(loop, maxlen=0)
    return (time.perf_counter() - start) / length


PR_SET_PDEATHSIG = 1
"""An option of `prctl`, as linux/prctl.h has it."""
SERVERS_PYTHON = "FXLIB_BENCH_SERVERS_PYTHON"
"""Variable that names the interpreter of server processes, where it is not this one."""


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
    least = "  ".join(f"{arm} {1e3 * each:.2f}" for arm, each in found.bound_s.items())
    said = "  ".join(f"{arm} {1e3 * each:.2f}" for arm, each in found.predicted_s.items())
    return f"{case}: {medians} ms (by hand: {found.hand}); predicted {said}; {least} ms"


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
