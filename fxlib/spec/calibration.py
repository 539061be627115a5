"""What a layer on int8 weights takes, as it was seen where the data are: ranges leave the job, and no values."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """The range of what one layer takes, or of a value between layers.

    Its ends are both infinite where a value was not finite.
    """

    weights: tuple[str, ...]
    """The names of the module's tensors behind the layer's weights, sorted; none for a value between layers."""
    use: int = 0
    """Number of layers of the same weights, or of values between layers, that come before it in the graph."""
    least: float
    most: float
    values: int
    """Number of values that were seen."""
    too_far: str = ""
    """Why the layer stays in float although its range is known, as `Reason.ERROR_BOUND` has it; empty: it need not."""
    shape: tuple[int, ...] = ()
    """Its sizes, which tell what can be added up without a copy; none if they are not known."""

    @property
    def problem(self) -> str:
        """What is wrong with it, as words that follow "range"; empty if nothing is."""
        finite = math.isfinite(self.least) and math.isfinite(self.most)
        if not finite and (self.least, self.most) != (-math.inf, math.inf):
            return f"{self.least} to {self.most} is none"
        if not self.least <= 0.0 <= self.most:
            return f"{self.least} to {self.most} does not hold zero"
        return "of less than no values" if min(self.values, self.use, *self.shape) < 0 else ""
