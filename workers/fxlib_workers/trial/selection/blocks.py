"""Blocks: so many steps of one arm in a row, long enough for a clock and short enough to be interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from fxlib_workers.trial.selection.arms import Arm

RunBlock = Callable[[Arm, int], float]
"""Runs so many steps of an arm and returns their seconds."""

BLOCK_S: Final = 0.25
"""Aim for the length of a block: long beside a scheduler's time slice, short beside a machine's moods."""

_BLOCKS_OF_BUDGET: Final = 40
_MOST_STEPS: Final = 4096


def steps_per_block(run: RunBlock, arms: Sequence[Arm], deadline: float) -> int:
    """Warm arms up, and return how many steps make a block of the aimed length, or of a share of the budget."""
    aim_s = min(BLOCK_S, max(0.0, deadline - time.monotonic()) / _BLOCKS_OF_BUDGET)
    steps = 1
    while True:
        longest_s = max(run(arm, steps) for arm in arms)
        if longest_s >= aim_s / 2 or steps >= _MOST_STEPS or time.monotonic() > deadline:
            return max(1, min(_MOST_STEPS, round(steps * aim_s / max(longest_s, 1e-9))))
        steps *= 2
