"""What the steps of one cell come to: the share of the headroom that was captured; and what all cells say together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.grid.cells import BLOCKING, BOUND, COMPUTE, FXLIB, HAND, HAND_PIPELINE, PAPER, PIPELINE, PIPELINE_BOUND
from benchmarks.grid.measure import Measured
from benchmarks.report import RESAMPLES, Row, median_interval, ratio_interval, row

BENCHMARK = "overlap"
Medians = NDArray[np.float64]


def rows(found: Measured) -> list[Row]:
    """Return all figures of a cell."""
    steps = [
        row(
            benchmark=BENCHMARK,
            case=found.case,
            arm=arm,
            metric="step_seconds",
            unit="s",
            samples=found.step_s[arm],
        )
        for arm in (BLOCKING, PAPER, FXLIB, HAND, PIPELINE, HAND_PIPELINE, COMPUTE)
        if arm in found.step_s
    ]
    bounds = [figure(found, arm, "step_seconds", "s", each, each, each) for arm, each in found.bound_s.items()]
    ratios = [ratio(found, "speedup", BLOCKING, FXLIB), ratio(found, "ratio_to_hand", FXLIB, HAND)]
    if PIPELINE in found.step_s:
        ratios += [
            ratio(found, "speedup", BLOCKING, PIPELINE, of=PIPELINE),
            ratio(found, "speedup_across_the_step", FXLIB, PIPELINE, of=PIPELINE),
            ratio(found, "ratio_to_hand_pipeline", PIPELINE, HAND_PIPELINE, of=PIPELINE),
            ratio(found, "ratio_to_compute", PIPELINE, COMPUTE, of=PIPELINE),
            *(
                figure(found, arm, "share_to_bound", "share", *interval(found, _to_bound(found), (FXLIB, arm)))
                for arm in (PIPELINE, HAND_PIPELINE)
            ),
        ]
    return [*steps, *bounds, *shares(found), *ratios, *predictions(found)]


def shares(found: Measured) -> list[Row]:
    """Return the share of the headroom that each overlapping arm captures, (blocking - arm) / (blocking - compute)."""
    return [
        figure(found, arm, "headroom_share", "share", *interval(found, headroom_share, (BLOCKING, arm, COMPUTE)))
        for arm in (PAPER, FXLIB, HAND, PIPELINE, HAND_PIPELINE)
        if arm in found.step_s
    ]


def _to_bound(found: Measured) -> Callable[[Medians, Medians], Medians]:
    """Return the share that reading ahead captures of what lies between the step by itself and the bound of a loop."""
    least_s = found.bound_s[PIPELINE_BOUND]
    return lambda within, across: (within - across) / (within - least_s)


def headroom_share(blocking: Medians, arm: Medians, compute: Medians) -> Medians:
    """By seconds per step."""
    return (blocking - arm) / (blocking - compute)


def ratio(found: Measured, metric: str, above: str, below: str, *, of: str = FXLIB) -> Row:
    """Return the median ratio of two arms, block by block of one round, as a figure of the arm `of`."""
    return figure(found, of, metric, "", *ratio_interval(found.step_s[above], found.step_s[below]))


def predictions(found: Measured) -> Iterator[Row]:
    """Yield what the cost model said of the arms that it knows, and how far off that was."""
    for arm, predicted_s in found.predicted_s.items():
        yield figure(found, arm, "predicted_step_seconds", "s", predicted_s, predicted_s, predicted_s)
        error = interval(found, lambda measured, said=predicted_s: abs(said / measured - 1), [arm])
        yield figure(found, arm, "prediction_error", "share", *error)


def figure(found: Measured, arm: str, metric: str, unit: str, value: float, low: float, high: float) -> Row:  # noqa: PLR0917
    """Return a row of the cell."""
    return Row(
        benchmark=BENCHMARK, case=found.case, arm=arm, metric=metric, value=value, unit=unit, low=low, high=high,
        runs=len(found.step_s[FXLIB]),
    )  # fmt: skip


def interval(
    found: Measured, of_medians: Callable[..., Medians], arms: Sequence[str], *, level: float = 0.95
) -> tuple[float, float, float]:
    """Return a figure of the arms' medians, and its percentile bootstrap interval: rounds are drawn, with all arms."""
    steps = [np.asarray(found.step_s[arm]) for arm in arms]
    rounds = len(steps[0])
    picks = np.random.default_rng(0).integers(0, rounds, size=(RESAMPLES, rounds))
    drawn = of_medians(*(np.median(each[picks], axis=1) for each in steps))
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(of_medians(*(np.median(each) for each in steps))), float(low), float(high)


SLACK = 0.02
"""Share by which the end of an interval may be off before a cell counts as slower."""
WANTED = 0.90
"""Share of the headroom that a cell should capture."""


Cell = Mapping[tuple[str, str], Row]
"""The rows of one cell, by arm and metric."""


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that end the table: medians over all cells, then how many fall short, and by how much."""
    cells = [each for each in _by_cell(rows) if (FXLIB, "speedup") in each]  # rows of memory are of no cell
    behind = [each[FXLIB, "ratio_to_hand"] for each in cells if each[FXLIB, "ratio_to_hand"].low > 1 + SLACK]
    slower = [each[FXLIB, "speedup"] for each in cells if each[FXLIB, "speedup"].high < 1 / (1 + SLACK)]
    bounded = [_distance_to_bound(each) for each in cells if _possible_share(each) < WANTED]
    known = [each for each in cells if (PIPELINE, "speedup") in each]
    behind_across = [
        each[PIPELINE, "ratio_to_hand_pipeline"]
        for each in known
        if each[PIPELINE, "ratio_to_hand_pipeline"].low > 1 + SLACK
    ]
    slower_across = [
        each[PIPELINE, "speedup_across_the_step"]
        for each in known
        if each[PIPELINE, "speedup_across_the_step"].high < 1 / (1 + SLACK)
    ]
    return [
        *_medians(cells),
        *_listed("cells_below_hand", behind, len(cells)),
        *_listed("cells_slower_than_blocking", slower, len(cells)),
        *(_listed("cells_below_hand_pipeline", behind_across, len(known), arm=PIPELINE) if known else ()),
        *(_listed("cells_slower_than_within_the_step", slower_across, len(known), arm=PIPELINE) if known else ()),
        *_listed("cells_that_the_bound_keeps_below_0.90", bounded, len(cells)),
    ]


def _by_cell(rows: Sequence[Row]) -> list[Cell]:
    cells: dict[str, dict[tuple[str, str], Row]] = {}
    for each in rows:
        cells.setdefault(str(each.case), {})[each.arm, each.metric] = each
    return list(cells.values())


def _medians(cells: Sequence[Cell]) -> Iterator[Row]:
    shares = [(arm, "headroom_share") for arm in (PAPER, FXLIB, HAND, PIPELINE, HAND_PIPELINE)]
    ratios = [(PIPELINE, each) for each in ("speedup_across_the_step", "ratio_to_hand_pipeline")]
    bounds = [(arm, "share_to_bound") for arm in (PIPELINE, HAND_PIPELINE)]
    errors = [(arm, "prediction_error") for arm in (BLOCKING, FXLIB, PIPELINE)]
    for arm, metric in (*shares, *ratios, *bounds, *errors):
        if values := [cell[arm, metric].value for cell in cells if (arm, metric) in cell]:
            yield _over_cells(len(values), arm, f"median_{metric}", "share", median_interval(values))


def _listed(metric: str, short: Sequence[Row], cells: int, *, arm: str = FXLIB) -> Iterator[Row]:
    count = float(len(short))
    yield _over_cells(cells, arm, metric, "cells", (count, count, count))
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
