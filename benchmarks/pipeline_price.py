"""Where a pipeline's time goes beside an expert's loop: calls that stay apart, checks, and the rest.

Servers that answer at once, since then nothing hides what the trainer does. Arms, their blocks in random order, in one
process and against the same servers: `hand_pipeline` (an expert's loop, in the fastest of three ways; where a message
carries many lookups, with one stacked tensor of keys, rows and gradients); `hand_apart` (the same loop, one message to
each server, with a tensor for each call, which is what the program says); `hand_exact` (where lookups are pushed:
with gradients as fxlib takes them, too, so that nothing that a program does to its tensors changes what is pushed);
`pipeline` (the recipe `schedule` under `fxlib.pipeline`); `unchecked` (the same without its guards, without comparing
batches with what was fetched for them, without a watch over writes and without asking for other trainers; nobody can
use it). Metrics: `step_seconds`, and ratios of blocks of the same round: `ratio_to_hand_pipeline`, and for `pipeline`
`ratio_to_unchecked`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from benchmarks.grid.arms import Job, Steps, arms, check, knowing_next, one_by_one
from benchmarks.grid.cells import BLOCKING, HAND_PIPELINE, MIDDLE, PIPELINE, Cell
from benchmarks.grid.expert import ExpertApart, ExpertExact
from benchmarks.grid.measure import CHOOSING_STEPS, fastest, interleaved
from benchmarks.grid.recommender import served
from benchmarks.report import Row, main, row
from fxlib.pipeline.entry import Entry
from fxlib.pipeline.program import Program
from fxlib.pipeline.trainers import Trainers
from fxlib.pipeline.watch import Watch
from fxlib.ps.local import local
from fxlib.runtime.guards.fact_table import Facts
from fxlib.runtime.mirrored_module import MirroredModule
from fxlib.runtime.module import CapturedModule

HAND_APART, HAND_EXACT, UNCHECKED = "hand_apart", "hand_exact", "unchecked"
CELLS: Final = tuple(
    replace(MIDDLE, service_ms=0.0, lookups=lookups, mode=mode, conflicts=0.1)
    for mode in ("local", "push")
    for lookups in (8, 26)
)
ROUNDS, QUICK_ROUNDS = 81, 7


def measure(quick: bool) -> Sequence[Row]:
    """Measure each cell, in a process and with servers of its own: none has objects of another one's to collect."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        return [each for cell in CELLS for each in processes.submit(compare, cell, rounds).result()]


def compare(cell: Cell, rounds: int) -> list[Row]:
    """Measure all arms of one cell."""
    torch.set_num_threads(1)
    with local(served(cell.servers)):
        step_s = seconds(cell, rounds)
    seconds_of = partial(row, benchmark=NAME, case=cell.case, metric="step_seconds", unit="s")
    found = [seconds_of(arm=arm, samples=samples) for arm, samples in step_s.items()]
    pairs = [(arm, HAND_PIPELINE) for arm in step_s if arm != HAND_PIPELINE] + [(PIPELINE, UNCHECKED)]
    ratio_of = partial(row, benchmark=NAME, case=cell.case, unit="")
    return found + [
        ratio_of(
            arm=arm,
            metric=f"ratio_to_{other}",
            samples=[a / b for a, b in zip(step_s[arm], step_s[other], strict=True)],
        )
        for arm, other in pairs
    ]


def seconds(cell: Cell, rounds: int) -> Mapping[str, Sequence[float]]:
    """Check that the arms compute the same; return the seconds of a step by arm, one for each round."""
    job = Job.of(cell)
    job.reset_servers()
    made = arms(job)
    pipeline = made.across[PIPELINE]
    programs: dict[str, Steps] = {
        HAND_APART: knowing_next(job, ExpertApart(job.towers, cell)),
        PIPELINE: pipeline,
        UNCHECKED: lambda count: without_checks(pipeline(count)),
    }
    if cell.mode == "push":
        programs[HAND_EXACT] = knowing_next(job, ExpertExact(job.towers, cell))
    programs[HAND_PIPELINE] = made.tried_across[fastest(made.tried_across)]
    check(job, {BLOCKING: one_by_one(job, made.steps[BLOCKING]), **programs})
    deque(pipeline(CHOOSING_STEPS), maxlen=0)
    return interleaved(programs, rounds=rounds, ahead=programs)


def without_checks(steps: Iterable[Tensor]) -> Iterator[Tensor]:
    """Run a loop whose batches, module and servers nothing else changes, without looking whether that is so."""
    with ExitStack() as stack:
        for owner, name, answer in _ANSWERS:
            stack.enter_context(mock.patch.object(owner, name, answer))
        yield from steps


def _nothing(*_: object, **__: object) -> None:
    """Find nothing wrong."""


_ANSWERS: tuple[tuple[type, str, Any], ...] = (
    (CapturedModule, "_guard_failure", _nothing),
    (MirroredModule, "_follow", _nothing),
    (Facts, "ask_caches", _nothing),
    (Watch, "add", _nothing),
    (Trainers, "are_several", False),
    (Program, "noted", lambda self, _: [...] * len(self.sources)),
    (Entry, "unchanged", lambda self, *_: [True] * len(self.noted)),
)
"""Checks, and what they answer where nothing has changed."""

NAME = "pipeline_price"

if __name__ == "__main__":
    main(NAME, measure, about="What a pipeline's step takes beside an expert's, piece by piece.")
