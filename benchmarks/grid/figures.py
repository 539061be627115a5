"""What the steps of one cell come to: the share of the headroom that was captured, and how that compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.grid.cells import BLOCKING, BOUND, COMPUTE, FXLIB, HAND, PAPER
from benchmarks.grid.measure import Measured
from benchmarks.report import RESAMPLES, Row, ratio_interval, row

BENCHMARK = "overlap"
Medians = NDArray[np.float64]


def rows(found: Measured) -> list[Row]:
    """Return all figures of a cell."""
    steps = [
        row(
            benchmark=BENCHMARK,
            case=found.cell.case,
            arm=arm,
            metric="step_seconds",
            unit="s",
            samples=found.step_s[arm],
        )
        for arm in (BLOCKING, PAPER, FXLIB, HAND, COMPUTE)
    ]
    bound = figure(found, BOUND, "step_seconds", "s", found.bound_s, found.bound_s, found.bound_s)
    ratios = [ratio(found, "speedup", BLOCKING, FXLIB), ratio(found, "ratio_to_hand", FXLIB, HAND)]
    return [*steps, bound, *shares(found), *ratios, *predictions(found)]


def shares(found: Measured) -> list[Row]:
    """Return the share of the headroom that each overlapping arm captures, (blocking - arm) / (blocking - compute)."""
    return [
        figure(found, arm, "headroom_share", "share", *interval(found, headroom_share, (BLOCKING, arm, COMPUTE)))
        for arm in (PAPER, FXLIB, HAND)
    ]


def headroom_share(blocking: Medians, arm: Medians, compute: Medians) -> Medians:
    """By seconds per step."""
    return (blocking - arm) / (blocking - compute)


def ratio(found: Measured, metric: str, above: str, below: str) -> Row:
    """Return the median ratio of two arms, block by block of one round."""
    return figure(found, FXLIB, metric, "", *ratio_interval(found.step_s[above], found.step_s[below]))


def predictions(found: Measured) -> Iterator[Row]:
    """Yield what the cost model said of the arms that it knows, and how far off that was."""
    for arm, predicted_s in found.predicted_s.items():
        yield figure(found, arm, "predicted_step_seconds", "s", predicted_s, predicted_s, predicted_s)
        error = interval(found, lambda measured, said=predicted_s: abs(said / measured - 1), [arm])
        yield figure(found, arm, "prediction_error", "share", *error)


def figure(found: Measured, arm: str, metric: str, unit: str, value: float, low: float, high: float) -> Row:  # noqa: PLR0917
    """Return a row of the cell."""
    return Row(
        benchmark=BENCHMARK, case=found.cell.case, arm=arm, metric=metric, value=value, unit=unit, low=low, high=high,
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
