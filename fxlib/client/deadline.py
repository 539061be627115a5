"""A point in time by which an answer is wanted."""

from __future__ import annotations

import math
import time


class Deadline:
    """A deadline a given number of seconds after its creation, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.left_s == 0.0

    def within(self, seconds: float = math.inf) -> Deadline:
        """Return a deadline `seconds` from now, or this one's if that is sooner."""
        return Deadline(min(self.left_s, seconds))
