"""What the cells say together, and which of them fall short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.grid.cells import BLOCKING, BOUND, COMPUTE, FXLIB, HAND, PAPER
from benchmarks.grid.figures import BENCHMARK
from benchmarks.report import Row, median_interval

SLACK = 0.02
"""What the end of an interval may be off before a cell counts as slower."""
WANTED = 0.90
"""Of the headroom."""


Cell = Mapping[tuple[str, str], Row]
"""The rows of one cell, by arm and metric."""


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that end the table: medians over all cells, then how many fall short, and by how much."""
    cells = _by_cell(rows)
    behind = [each[FXLIB, "ratio_to_hand"] for each in cells if each[FXLIB, "ratio_to_hand"].low > 1 + SLACK]
    slower = [each[FXLIB, "speedup"] for each in cells if each[FXLIB, "speedup"].high < 1 / (1 + SLACK)]
    bounded = [_distance_to_bound(each) for each in cells if _possible_share(each) < WANTED]
    return [
        *_medians(cells),
        *_listed("cells_below_hand", behind, len(cells)),
        *_listed("cells_slower_than_blocking", slower, len(cells)),
        *_listed("cells_that_the_bound_keeps_below_0.90", bounded, len(cells)),
    ]


def _by_cell(rows: Sequence[Row]) -> list[Cell]:
    cells: dict[str, dict[tuple[str, str], Row]] = {}
    for each in rows:
        cells.setdefault(str(each.case), {})[each.arm, each.metric] = each
    return list(cells.values())


def _medians(cells: Sequence[Cell]) -> Iterator[Row]:
    shares = [(arm, "headroom_share") for arm in (PAPER, FXLIB, HAND)]
    for arm, metric in (*shares, (BLOCKING, "prediction_error"), (FXLIB, "prediction_error")):
        if values := [cell[arm, metric].value for cell in cells if (arm, metric) in cell]:
            yield _over_cells(len(values), arm, f"median_{metric}", "share", median_interval(values))


def _listed(metric: str, short: Sequence[Row], cells: int) -> Iterator[Row]:
    count = float(len(short))
    yield _over_cells(cells, FXLIB, metric, "cells", (count, count, count))
    yield from short


def _possible_share(cell: Cell) -> float:
    """Return the share of the headroom that the lower bound leaves; all of it where no bound is known."""
    if (BOUND, "step_seconds") not in cell:
        return 1.0
    blocking, bound, compute = (cell[arm, "step_seconds"].value for arm in (BLOCKING, BOUND, COMPUTE))
    return (blocking - bound) / (blocking - compute)


def _distance_to_bound(cell: Cell) -> Row:
    ours, bound = cell[FXLIB, "step_seconds"], cell[BOUND, "step_seconds"].value
    over = {end: getattr(ours, end) / bound - 1 for end in ("value", "low", "high")}
    return replace(ours, metric="distance_to_bound", unit="share", **over)


def _over_cells(cells: int, arm: str, metric: str, unit: str, found: tuple[float, float, float]) -> Row:
    value, low, high = found
    return Row(
        benchmark=BENCHMARK, case={"cells": cells}, arm=arm, metric=metric, value=value, unit=unit, low=low, high=high,
        runs=cells,
    )  # fmt: skip
