"""Which of two exact ways is faster in this loop, measured as it runs: only its servers know what takes their time."""

from __future__ import annotations

import statistics
import time

_RUN = 5
"""Steps that are made one way before the other is tried; the first still has what the other left."""
_RUNS = 4
"""Runs before one of the ways is chosen: two of each."""
_STEPS = 500
"""Steps that the way that was chosen has, before both are tried again: loops change."""


class MeasuredChoice:
    """Tries reading by keys and reading behind the push in turn, and keeps to what has the shorter median step.

    Attributes:
        by_keys: whether the next step's reads are by keys.
    """

    def __init__(self) -> None:
        self.by_keys = True
        self._step = 0
        self._last_s: float | None = None
        self._took_s: dict[bool, list[float]] = {True: [], False: []}

    def loop_began(self) -> None:
        """Note that what comes before the next end of a step is more than a step."""
        self._last_s = None

    def step_ended(self) -> None:
        """Note the end of a step's pushes, and decide how the next step's reads are made."""
        now, before = time.perf_counter(), self._last_s
        self._last_s = now
        tried = _RUN * _RUNS
        if before is None:
            return
        if self._step < tried and self._step % _RUN > 0:
            self._took_s[self.by_keys].append(now - before)
        self._step += 1
        if self._step < tried:
            self.by_keys = self._step // _RUN % 2 == 0
        elif self._step == tried:
            self.by_keys = statistics.median(self._took_s[True]) <= statistics.median(self._took_s[False])
        elif self._step == tried + _STEPS:
            self.by_keys, self._step, self._took_s = True, 0, {True: [], False: []}
