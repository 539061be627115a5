"""Blocks of the arms of one cell, interleaved in one process and against the same servers."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.grid.arms import Job, Step, arms, check
from benchmarks.grid.cells import HAND, Cell

Name = TypeVar("Name", bound=str)

BLOCK_S = 0.1
TRIED_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one cell gave: seconds per step by arm, one per round, in the order of the rounds."""

    cell: Cell
    step_s: Mapping[str, list[float]]
    hand: str
    """Which of an expert's programs was the fastest."""
    predicted_s: Mapping[str, float]
    """Seconds per step by arm, as the cost model had it."""
    bound_s: float
    """Of a step that no schedule can beat."""

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Measured:
        """Read what `dataclasses.asdict` made of one."""
        return cls(**{**given, "cell": Cell(**given["cell"])})


def measure(cell: Cell, *, rounds: int) -> Measured:
    """Check that all arms compute the same, then time them."""
    job = Job.of(cell)
    job.reset_servers()
    found = arms(job)
    check(job, {**found.steps, **{f"{HAND} ({way})": step for way, step in found.tried.items()}})
    samples = interleaved(found.tried, rounds=TRIED_ROUNDS)
    best = min(samples, key=lambda way: statistics.median(samples[way]))
    step_s = interleaved({**found.steps, HAND: found.tried[best]}, rounds=rounds)
    return Measured(cell=cell, step_s=step_s, hand=best, predicted_s=found.predicted_s, bound_s=found.bound_s)


def interleaved(programs: Mapping[Name, Step], *, rounds: int) -> dict[Name, list[float]]:
    """Run the programs in blocks, in a new random order each round; return seconds per step, round by round."""
    lengths = {arm: max(1, round(BLOCK_S / block(step, 2))) for arm, step in programs.items()}
    samples: dict[Name, list[float]] = {arm: [] for arm in programs}
    order, dice = list(programs), random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for arm in order:
            samples[arm].append(block(programs[arm], lengths[arm]))
    return samples


def block(step: Step, length: int) -> float:
    """Seconds per step over so many of them."""
    start = time.perf_counter()
    for _ in range(length):
        step()
    return (time.perf_counter() - start) / length
