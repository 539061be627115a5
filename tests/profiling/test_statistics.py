"""The interval that trials stop by."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from fxlib.profiling.statistics import ConfidenceSequence, rate

Noise = Callable[[np.random.Generator, int], NDArray[np.float64]]


def normal(rng: np.random.Generator, pairs: int) -> NDArray[np.float64]:
    return rng.normal(0.0, 0.03, (pairs, 2))


def heavy_tailed(rng: np.random.Generator, pairs: int) -> NDArray[np.float64]:
    return 0.03 * rng.standard_t(1.2, (pairs, 2))


def autocorrelated(rng: np.random.Generator, pairs: int) -> NDArray[np.float64]:
    slots = 0.02 * rng.standard_t(3, 2 * pairs)
    for index in range(1, len(slots)):
        slots[index] += 0.9 * slots[index - 1]
    return slots.reshape(pairs, 2)


def drifting(rng: np.random.Generator, pairs: int) -> NDArray[np.float64]:
    trend = np.linspace(0.0, 1.0, 2 * pairs).reshape(pairs, 2)  # a machine that slows down all the while
    return trend + rng.normal(0.0, 0.01, (pairs, 2))


def log_ratios(rng: np.random.Generator, noise: Noise, pairs: int, gain: float = 0.0) -> NDArray[np.float64]:
    slots = noise(rng, pairs)
    return rng.choice([-1.0, 1.0], pairs) * (slots[:, 0] - slots[:, 1]) + math.log1p(gain)


def pairs_until(values: NDArray[np.float64], threshold: float, confidence: float) -> int | None:
    """After how many pairs the lower end was above the threshold, looking after each of them."""
    sequence = ConfidenceSequence(confidence)
    for count, value in enumerate(values, start=1):
        sequence.add(float(value))
        if sequence.above(threshold):
            return count
    return None


@pytest.mark.slow
@pytest.mark.parametrize("noise", [normal, heavy_tailed, autocorrelated, drifting])
def test_equal_arms_are_told_apart_no_more_often_than_the_level_says(noise: Noise) -> None:
    rng = np.random.default_rng(1)
    runs, level = 800, 0.2  # one-sided 10%: an error rate that so many runs can show
    errors = sum(pairs_until(log_ratios(rng, noise, 60), 0.0, 1 - level) is not None for _ in range(runs))
    assert errors / runs <= level / 2 + 0.02  # two standard errors


def test_a_large_gain_is_seen_within_ten_pairs() -> None:
    rng = np.random.default_rng(2)
    assert (pairs_until(log_ratios(rng, normal, 50, gain=0.5), math.log1p(0.02), 0.95) or 99) <= 10


def test_outliers_do_not_hide_a_gain() -> None:
    rng = np.random.default_rng(3)
    assert pairs_until(log_ratios(rng, heavy_tailed, 200, gain=0.3), math.log1p(0.02), 0.95) is not None


def test_the_interval_holds_the_truth() -> None:
    rng = np.random.default_rng(4)
    sequence = ConfidenceSequence(0.95)
    for value in log_ratios(rng, normal, 300, gain=0.1):
        sequence.add(float(value))
    gain = sequence.gain()
    assert gain.low < 0.1 < gain.high
    assert gain.low <= gain.value <= gain.high
    assert gain.high - gain.low < 0.05


def test_nothing_is_claimed_before_there_is_evidence() -> None:
    sequence = ConfidenceSequence(0.95)
    assert sequence.interval() == (-math.inf, math.inf)
    sequence.add(1.0)
    assert sequence.interval() == (-math.inf, math.inf)


def test_swapping_the_arms_mirrors_the_interval() -> None:
    one, other = ConfidenceSequence(0.9), ConfidenceSequence(0.9)
    for value in np.random.default_rng(5).normal(0.05, 0.02, 40):
        one.add(float(value))
        other.add(float(-value))
    low, high = one.interval()
    assert other.interval() == pytest.approx((-high, -low), abs=1e-5)


def test_a_rate_is_all_samples_over_all_seconds() -> None:
    estimate = rate([100.0, 100.0, 200.0], [1.0, 1.0, 2.0], 0.95)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((100.0, 100.0, 100.0))
