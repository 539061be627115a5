"""What a trial compares: the original and its candidates, by name."""

from __future__ import annotations

from typing import Final

from fxlib.reasons import Reason

Arm = str
"""The original, or the name of a candidate."""

ORIGINAL: Final[Arm] = "original"

MOVED: Final[Arm] = "original, elsewhere in memory"


def fails(arm: Arm) -> Reason:
    """Return what an exception in an arm's own code means."""
    return Reason.ORIGINAL_FAILS if arm in (ORIGINAL, MOVED) else Reason.CANDIDATE_FAILS
