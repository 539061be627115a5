"""Keys that come again: how often, and how unevenly, in batches; and made-up batches in which they do so, too.

Of an integer tensor, each place in the last dimension is a column of keys of its own, such as those of one table. The
share of a column's keys that are among those of the batch before decides how many rows a push changes of what was read
ahead. How unevenly keys are named is told by one exponent, of a bounded Pareto distribution (Zipf's law, on a
continuum) over the range of the tensor: that under which two keys of a column are as often the same as they were seen
to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

MAX_SKEW = 8.0
"""The largest exponent: all but a few in a thousand keys are the first then."""
_LEAST_SKEW = 0.05
_HEAD = 1 << 12
"""Number of keys whose probabilities are added up singly."""
_TRIES = 16
"""Number of times that a key is drawn anew that comes again, or does not, against what is wanted."""
_SMALL = 1e-6
"""Distance from 1 below which an exponent counts as 1."""


def repeats_in(tensors: Sequence[torch.Tensor]) -> float | None:
    """Return the share of keys that are among those of the tensor before; None where there are too few tensors."""
    columns = [_columns(each) for each in tensors]
    shares = [
        float(_is_among(following, before).double().mean())
        for before, following in pairwise(columns)
        if following.numel() and before.shape[1] == following.shape[1]
    ]
    return sum(shares) / len(shares) if shares else None


def skew_of(tensors: Sequence[torch.Tensor], size: int) -> float:
    """Return the exponent of the distribution of keys, of which there are `size`; 0 where it is uniform."""
    same = pairs = 0
    for tensor in tensors:
        columns = _columns(tensor)
        counts = _apart(columns).unique(return_counts=True)[1]
        same += int((counts * (counts - 1)).sum())
        pairs += columns.numel() * (len(columns) - 1)
    if not pairs or size < 2:
        return 0.0
    wanted, low, high = same / pairs, 0.0, MAX_SKEW
    while high - low > _LEAST_SKEW / 4:
        middle = (low + high) / 2
        low, high = (middle, high) if _collision(middle, size) < wanted else (low, middle)
    return 0.0 if low < _LEAST_SKEW else round(low, 2)


def draw_keys(
    shape: tuple[int, ...],
    size: int,
    *,
    skew: float,
    repeats: float | None,
    before: torch.Tensor | None,
    count: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Draw keys from [0, size).

    Args:
        shape: their shape.
        size: the number of keys that there are.
        skew: see `skew_of`.
        repeats: see `repeats_in`.
        before: the keys of the batch before; None of the first.
        count: number of batches that come in turn. The first repeats the last by chance alone: the others make up
            for it.
        generator: draws.
    """
    keys = _columns(_drawn(shape, size, skew, generator))
    if repeats is None or before is None or not keys.numel():
        return keys.reshape(shape)
    earlier = _columns(before)
    by_chance = float(_is_among(keys, earlier).double().mean())
    share = min(1.0, max(0.0, (repeats * count - by_chance) / (count - 1)))
    again = torch.rand(keys.shape, generator=generator).argsort(0) < round(share * len(keys))
    for _ in range(_TRIES):
        wrong = _is_among(keys, earlier) != again
        if not wrong.any():
            return keys.reshape(shape)
        keys = torch.where(wrong, _columns(_drawn(shape, size, skew, generator)), keys)
    order = torch.rand(earlier.shape, generator=generator).argsort(0)
    return torch.where(again & ~_is_among(keys, earlier), earlier.gather(0, order), keys).reshape(shape)


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    """Return keys as [rows, columns]."""
    return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1).to(torch.int64)


def _is_among(keys: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Whether each key is among those of the same column."""
    own, before = _apart(torch.cat([keys, others])).split([len(keys), len(others)])
    return torch.isin(own, before)


def _apart(columns: torch.Tensor) -> torch.Tensor:
    """Return numbers that are the same where the keys of one column are."""
    number = columns.unique(return_inverse=True)[1].reshape(columns.shape)
    return number * columns.shape[1] + torch.arange(columns.shape[1])


def _drawn(shape: tuple[int, ...], size: int, skew: float, generator: torch.Generator) -> torch.Tensor:
    if not skew:
        return torch.randint(0, size, shape, generator=generator)
    power, uniform = 1.0 - skew, torch.rand(shape, generator=generator, dtype=torch.float64)
    logarithm = uniform * math.log(size + 1)
    if abs(power) > _SMALL:
        logarithm = (uniform * math.expm1(power * math.log(size + 1))).log1p() / power
    return (logarithm.exp().floor().to(torch.int64) - 1).clamp(0, size - 1)


def _collision(skew: float, size: int) -> float:
    """Return how likely two keys are the same: one by one for the first, as an integral for the others."""
    head = min(size, _HEAD)
    whole = _integral(skew, 1.0, size + 1.0)
    singly = sum((_integral(skew, key, key + 1.0) / whole) ** 2 for key in range(1, head + 1))
    return singly + _integral(2 * skew, head + 1.0, size + 1.0) / whole**2


def _integral(skew: float, low: float, high: float) -> float:
    """Return the integral of x ** -skew."""
    power = 1.0 - skew
    if abs(power) <= _SMALL:
        return math.log(high / low)
    return math.exp(power * math.log(low)) * math.expm1(power * math.log(high / low)) / power
