"""Fits costs to measurements: the least squares of relative errors over costs that are not below zero."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def fit(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return what one of each amount costs, such that sums of amounts times costs come near to the measured times.

    All sets of costs that may be zero are tried, so that amounts be few.

    Args:
        amounts: a row for each measurement, with as many columns as there are costs.
        seconds: of each measurement, above zero.

    Source: C. L. Lawson, R. J. Hanson, "Solving Least Squares Problems", 1974, chapter 23, of non-negative solutions.
    """
    taken_s = np.asarray(seconds, dtype=np.float64)
    rows = np.asarray(amounts, dtype=np.float64) / taken_s[:, None]
    count = rows.shape[1]
    best, least = np.zeros(count), float(len(taken_s))
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            costs = np.zeros(count)
            costs[chosen] = np.linalg.lstsq(rows[:, chosen], np.ones(len(taken_s)), rcond=None)[0]
            error = float(np.sum((rows @ costs - 1) ** 2))
            if (costs >= 0).all() and error < least:
                best, least = costs, error
    return tuple(map(float, best))
