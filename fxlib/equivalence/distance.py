"""How far two results are from each other."""

from __future__ import annotations

import math

import torch

from fxlib.utils.compare import same_bits
from fxlib.utils.tensors import numbers


def relative_error(value: object, reference: object) -> float:
    """Return the largest difference between two tensors, over the largest magnitude in the reference.

    N. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 2002, section 6.2: the error in the norm
    of the maximum. Element by element, what should be zero and is rounded would make any error as large as one likes.

    Returns:
        0 where the values are the same, NaN and infinities included. Infinity where no bound could hold: another dtype
        or shape, other values that are no floating-point numbers, or that are not finite on one side alone.
    """
    if not (isinstance(value, torch.Tensor) and isinstance(reference, torch.Tensor)):
        return 0.0 if type(value) is type(reference) and value == reference else math.inf
    if value.dtype != reference.dtype or value.is_nested != reference.is_nested:
        return math.inf
    if not (reference.is_floating_point() or reference.is_complex()) or reference.is_meta:
        return 0.0 if same_bits(value.detach().cpu(), reference.detach().cpu()) else math.inf
    wide = torch.complex128 if reference.is_complex() else torch.float64
    ours, theirs = (numbers(each).cpu().to(wide) for each in (value, reference))
    if ours.shape != theirs.shape:
        return math.inf
    unequal = ~torch.isclose(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)
    if not bool(unequal.any()):
        return 0.0
    if not bool((ours[unequal].isfinite() & theirs[unequal].isfinite()).all()):
        return math.inf
    scale = float(theirs[theirs.isfinite()].abs().max())
    return float((ours - theirs)[unequal].abs().max()) / scale if scale else math.inf
