"""A confidence interval that stays valid even if it is checked after every pair of blocks.

The figure is the log of the speed-up: x = log(seconds of the original's block / seconds of the candidate's) for each
pair. Which of the two runs first is a coin toss, so for the true effect `t` the differences x - t are as likely
positive as negative whatever the noise does: heavy tails, drift and blocks that resemble their neighbours only change
their sizes, which the argument conditions on. Betting on their signs is then a fair game, and by
Ville's inequality a fair game's wealth exceeds 1/a at any time with probability at most a. The interval holds the
effects that no bet has ruled out.

The bets are 1 + cap * tanh((x - t) / scale), whose wealth is averaged over scales and caps fixed beforehand; they fall
as t grows, so each one-sided bet holds for all smaller effects, too. Sources: V. H. de la Pena, "A general class of
exponential inequalities for martingales and ratios" (1999), for symmetric differences (with a Gaussian bet in tanh's
place); I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting" (2023); A. Ramdas et
al., "Admissible anytime-valid sequential inference must rely on nonnegative martingales" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fxlib.spec.report import Estimate

_SCALES: Final = np.geomspace(0.001, 0.5, 6)
"""Log-ratios for which the bets are made, from 0.1% to a half."""

_CAPS: Final = np.array([0.5, 0.9])
"""Shares of the wealth that one pair may cost, so that no outlier ruins a bet."""

_BRACKET: Final = 5.0
"""Log of the largest factor within which the effect is searched."""


class ConfidenceSequence:
    """An interval for the effect behind paired log-ratios, valid at every number of pairs at once.

    Args:
        confidence: the two-sided level, e.g. 0.95: each end errs with probability at most (1 - confidence) / 2.
    """

    def __init__(self, confidence: float) -> None:
        self._log_threshold = math.log(2.0 / (1.0 - confidence))
        self._log_ratios: list[float] = []

    def __len__(self) -> int:
        return len(self._log_ratios)

    def add(self, log_ratio: float) -> None:
        """Add one pair: log(original's seconds / candidate's seconds)."""
        self._log_ratios.append(log_ratio)

    def above(self, effect: float) -> bool:
        """Return whether the interval's lower end is above `effect`, on the log scale."""
        return _log_wealth(np.array(self._log_ratios) - effect) > self._log_threshold

    def below(self, effect: float) -> bool:
        """Return whether the interval's upper end is below `effect`, on the log scale."""
        return _log_wealth(effect - np.array(self._log_ratios)) > self._log_threshold

    def interval(self) -> tuple[float, float]:
        """Return the ends on the log scale; an end is infinite while nothing is ruled out."""
        values = np.array(self._log_ratios)
        return -_upper_end(-values, self._log_threshold), _upper_end(values, self._log_threshold)

    def gain(self) -> Estimate:
        """Return the gain in QPS (0.1 is 10%): the median of the pairs within its interval."""
        low, high = self.interval()
        centre = min(max(float(np.median(self._log_ratios)), low), high) if self._log_ratios else 0.0
        return Estimate(value=math.expm1(centre), low=math.expm1(low), high=math.expm1(high))


def _upper_end(values: NDArray[np.float64], log_threshold: float) -> float:
    """Bisect for the least effect that the bets on smaller ones rule out: their wealth grows with the effect."""
    low, high = -_BRACKET, _BRACKET
    if _log_wealth(high - values) < log_threshold:
        return math.inf
    while high - low > 1e-6:
        middle = (low + high) / 2
        if _log_wealth(middle - values) >= log_threshold:
            high = middle
        else:
            low = middle
    return high


def _log_wealth(differences: NDArray[np.float64]) -> float:
    """Return the log of the average wealth over all bets that the differences are positive."""
    stakes = np.tanh(differences[:, None] / _SCALES)
    logs = np.concatenate([np.log1p(cap * stakes).sum(axis=0) for cap in _CAPS])
    return float(np.logaddexp.reduce(logs) - math.log(len(logs)))


def rate(amounts: Sequence[float], seconds: Sequence[float], confidence: float) -> Estimate:
    """Return a rate over blocks (samples per second), with a percentile-bootstrap interval over the blocks."""
    amount, second = np.array(amounts), np.array(seconds)
    picks = np.random.default_rng(0).integers(0, len(amount), size=(1000, len(amount)))
    rates = amount[picks].sum(axis=1) / second[picks].sum(axis=1)
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(rates, [tail, 1.0 - tail])
    return Estimate(value=float(amount.sum() / second.sum()), low=float(low), high=float(high))
