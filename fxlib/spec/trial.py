"""How a trial measures and decides."""

from __future__ import annotations

from dataclasses import dataclass

from fxlib.errors import WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """How a trial measures and decides.

    Args:
        min_gain: the least relative gain in QPS worth adopting (0.02 is 2%).
        confidence: level of the interval whose lower end is compared with `min_gain`.
        budget_s: wall-clock budget of sameness and QPS measurement together, in seconds.
        sameness_steps: steps whose results are compared bit for bit.
        step_timeout_s: the longest that one step may take, in seconds; a longer one counts as hung.
        max_relative_error: how far the results of passes that do not promise the same bits may be from the original's;
            see `fxlib.utils.compare.relative_error`.

    Raises:
        WorkloadError: a figure is out of its range.
    """

    min_gain: float = 0.02
    confidence: float = 0.95
    budget_s: float = 60.0
    sameness_steps: int = 3
    step_timeout_s: float = 60.0
    max_relative_error: float = 1e-4

    def __post_init__(self) -> None:
        """Check the ranges."""
        limits = {
            "min_gain": (0.0 <= self.min_gain <= 10.0, "0 to 10 (0.02 is 2%)"),
            "confidence": (0.5 <= self.confidence <= 0.9999, "0.5 to 0.9999"),
            "budget_s": (1.0 <= self.budget_s <= 86_400.0, "1 to 86400 seconds"),
            "sameness_steps": (1 <= self.sameness_steps <= 1000, "1 to 1000"),
            "step_timeout_s": (0.1 <= self.step_timeout_s <= 3600.0, "0.1 to 3600 seconds"),
            "max_relative_error": (0.0 <= self.max_relative_error <= 1.0, "0 to 1 (0.0001 is one in ten thousand)"),
        }
        for name, (holds, wanted) in limits.items():
            if not holds:
                raise WorkloadError(f"{getattr(self, name)} is not in {wanted}", where=f"TrialOptions.{name}")
