"""What compiling the local work of a scheduled training step is worth: the parts between its remote calls.

A cell of the overlap grid, or the same around a local part that is mostly elementwise (`local_part`, see
`benchmarks.grid.recommender`), in one process against real servers, as there. Arms: `blocking`; `fxlib`, the recipe
`schedule`; `compiled`, that recipe and `lower` with TorchInductor, of whose parts those stay compiled that are faster
so, by timing each on what the step calls it with, as a trial does. Metrics: `seconds` of a step, blocks of the arms in
random order; `ratio` of the speeds; `parts` and `parts_compiled`; `compile_s`; `pays_after_steps`, where it pays; and
`bitwise`, 1 if losses, weights and servers are those of the blocking program after six steps bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

import torch

from benchmarks.grid.arms import Job, blocking, captured, one_by_one, outcome, rewritten
from benchmarks.grid.cells import BLOCKING, FXLIB, MOST_LOOKUPS, Cell
from benchmarks.grid.measure import interleaved
from benchmarks.grid.recommender import served
from benchmarks.report import Row, main, ratio_interval, row
from fxlib.passes import Lower
from fxlib.ps.local import local
from fxlib.recipes import recipes
from fxlib_workers.trial.compiled_parts import leave_parts, time_parts

COMPILED: Final = "compiled"
CELLS: Final = (
    *(
        Cell(lookups=8, service_ms=service_ms, hidden=hidden, mode=mode)
        for mode in ("local", "push")
        for service_ms in (0.0, 2.0)
        for hidden in (256, 1024)
    ),
    *(
        Cell(lookups=MOST_LOOKUPS, service_ms=service_ms, hidden=256, mode=mode, local_part="attention")
        for mode in ("local", "push")
        for service_ms in (0.0, 2.0)
    ),
)
ROUNDS, QUICK_ROUNDS = 21, 7
COMPILATION_S: Final = 300.0


def measure(quick: bool) -> Sequence[Row]:
    """Measure every cell; with `quick`, the second one."""
    torch.set_num_threads(1)
    cells, rounds = (CELLS[1:2], QUICK_ROUNDS) if quick else (CELLS, ROUNDS)
    with local(served(cells[0].servers)):
        return [each for cell in cells for each in figures(cell, rounds)]


def figures(cell: Cell, rounds: int) -> Iterator[Row]:
    """Measure one cell."""
    job = Job.of(cell)
    job.reset_servers()
    graph = captured(job)
    with_compiler = replace(recipes.get("schedule"), name=COMPILED)
    with_compiler = replace(with_compiler, passes=(*with_compiler.passes, Lower(backend="inductor")))
    schedule, lowered = (recipes.apply(graph, each).module for each in ("schedule", with_compiler))
    step = rewritten(job, lowered)
    parts = time_parts(lowered, step, limit_s=COMPILATION_S)
    leave_parts(lowered, {each.first for each in parts if not each.compiled})
    arms = {BLOCKING: blocking(job), FXLIB: rewritten(job, schedule), COMPILED: step}
    programs = {arm: one_by_one(job, each) for arm, each in arms.items()}
    expected = outcome(job, programs[BLOCKING])
    for arm in (FXLIB, COMPILED):
        same = [float(outcome(job, programs[arm]) == expected)]
        yield row(benchmark="compiled_steps", case=cell.case, arm=arm, metric="bitwise", unit="", samples=same)
    step_s = interleaved(programs, rounds=rounds)
    for arm, samples in step_s.items():
        yield row(benchmark="compiled_steps", case=cell.case, arm=arm, metric="seconds", unit="s", samples=samples)
    for arm, other in ((FXLIB, BLOCKING), (COMPILED, FXLIB)):
        value, low, high = ratio_interval(step_s[other], step_s[arm])
        yield Row(
            benchmark="compiled_steps",
            case=cell.case,
            arm=f"{arm}/{other}",
            metric="ratio",
            value=value,
            unit="",
            low=low,
            high=high,
            runs=rounds,
        )
    compile_s = sum(each.compile_s for each in parts)
    counts = {"parts": len(parts), "parts_compiled": sum(each.compiled for each in parts), "compile_s": compile_s}
    saved_s = median(step_s[FXLIB]) - median(step_s[COMPILED])
    if saved_s > 0.0:
        counts["pays_after_steps"] = round(compile_s / saved_s)
    for metric, value in counts.items():
        yield row(benchmark="compiled_steps", case=cell.case, arm=COMPILED, metric=metric, unit="", samples=[value])
    medians = "  ".join(f"{arm} {1e3 * median(each):.2f}" for arm, each in step_s.items())
    print(f"{cell.case}: {medians} ms, {counts}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main("compiled_steps", measure, about="Compiled local work of scheduled training steps.")
