"""Ranges of the inputs of layers on int8 weights, observed where the data are: ranges leave the job, values do not."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """The range of what one layer takes, or of a value between layers.

    Both ends are infinite if a value was not finite.
    """

    weights: tuple[str, ...]
    """Names of the module's tensors behind the layer's weights, sorted; empty for a value between layers."""
    use: int = 0
    """Number of layers with the same weights, or of values between layers, that come before it in the graph."""
    least: float
    most: float
    values: int
    """Number of values observed."""
    too_far: str = ""
    """Why the layer stays in float although its range is known, as in `Reason.ERROR_BOUND`; empty if it need not."""
    shape: tuple[int, ...] = ()
    """Its sizes, which say what can be added up without a copy; empty if they are unknown."""

    @property
    def problem(self) -> str:
        """The problem with it, as words that follow "range"; empty if there is none."""
        finite = math.isfinite(self.least) and math.isfinite(self.most)
        if not finite and (self.least, self.most) != (-math.inf, math.inf):
            return f"{self.least} to {self.most} is none"
        if not self.least <= 0.0 <= self.most:
            return f"{self.least} to {self.most} does not hold zero"
        return "of less than no values" if min(self.values, self.use, *self.shape) < 0 else ""
