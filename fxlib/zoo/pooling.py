"""Pool the gains on several machines into the one to expect on another machine of the kind, by a random-effects model.

The gain of a rewrite differs from machine to machine by more than the noise of each measurement. The model treats each
machine's gain as a random draw, as the logarithm of 1 + gain; the interval is that of the mean over all such machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

from fxlib.spec.report import Estimate

_LEAST_VARIANCE: Final = 1e-12
"""The variance of a measurement whose interval has no width."""


def logarithm(gain: Estimate, confidence: float) -> tuple[float, float]:
    """Return the logarithm of 1 + gain, and its standard error, which follows from the interval if it is normal."""
    low, value, high = (math.log(max(1.0 + each, 1e-9)) for each in (gain.low, gain.value, gain.high))
    return value, (high - low) / (2 * NormalDist().inv_cdf(0.5 + confidence / 2))


def pooled(machines: Sequence[Sequence[Estimate]], confidence: float) -> Estimate:
    """Return the mean gain over machines, each of which was measured at least once.

    Measurements of one machine are weighted by their precision. The variance between machines is DerSimonian's and
    Laird's, the interval that of Hartung and Knapp with k - 1 degrees of freedom; if machines agree better than their
    noise allows, the interval does not become narrower (Roever, Knapp and Friede's modification for few studies). With
    one machine, the interval is that of its measurements, since nothing is known about others.

    Sources: R. DerSimonian, N. Laird, "Meta-analysis in clinical trials", Controlled Clinical Trials 7, 1986;
    J. Hartung, G. Knapp, "A refined method for the meta-analysis of controlled clinical trials with binary outcome",
    Statistics in Medicine 20, 2001; C. Roever, G. Knapp, T. Friede, "Hartung-Knapp-Sidik-Jonkman approach and its
    modification for random-effects meta-analysis with few studies", BMC Medical Research Methodology 15, 2015.

    Args:
        machines: the measurements of each machine, at least one.
        confidence: the level of all intervals, including the returned one.
    """
    if len(machines) == 1 and len(machines[0]) == 1:
        return machines[0][0]
    measured = [_weighted([logarithm(gain, confidence) for gain in gains]) for gains in machines]
    if len(measured) == 1:
        ((mean, variance),) = measured
        return _estimate(mean, NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(variance))
    free = len(measured) - 1
    weights = [1 / variance for _, variance in measured]
    mean, _ = _mean(measured, weights)
    spread = sum(weight * (each - mean) ** 2 for weight, (each, _) in zip(weights, measured, strict=True))
    scale = sum(weights) - sum(weight**2 for weight in weights) / sum(weights)
    between = max(0.0, (spread - free) / scale)
    weights = [1 / (variance + between) for _, variance in measured]
    mean, variance = _mean(measured, weights)
    spread = sum(weight * (each - mean) ** 2 for weight, (each, _) in zip(weights, measured, strict=True))
    return _estimate(mean, t_quantile(confidence, free) * math.sqrt(max(1.0, spread / free) * variance))


def t_quantile(confidence: float, free: int) -> float:
    """Return the bound within which Student's t with `free` degrees of freedom stays with the given probability.

    Source: M. Abramowitz, I. Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4; the angle is bisected.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, free) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(free)


def _within(angle: float, free: int) -> float:
    """Return the probability that |t| is below tan(angle) times the square root of the degrees of freedom."""
    odd = free % 2
    term = total = (math.cos(angle) if free > 1 else 0.0) if odd else 1.0
    for each in range(3 if odd else 2, free - 1, 2):
        term *= (each - 1) / each * math.cos(angle) ** 2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _weighted(measured: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of one machine's measurements, and its variance."""
    known = [(mean, max(error**2, _LEAST_VARIANCE)) for mean, error in measured]
    return _mean(known, [1 / variance for _, variance in known])


def _mean(measured: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    total = sum(weights)
    return sum(weight * mean for weight, (mean, _) in zip(weights, measured, strict=True)) / total, 1 / total


def _estimate(mean: float, half: float) -> Estimate:
    return Estimate(value=math.expm1(mean), low=math.expm1(mean - half), high=math.expm1(min(mean + half, 700.0)))
