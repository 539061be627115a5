"""Choose the fastest of several exact ways to make reads, measured while the loop runs on its own servers."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from fxlib.analysis.effects.prologue import Way

_RUN = 5
"""Number of steps that one way is tried for, besides the steps that still have batches read by the way before."""
_ROUNDS = 2
"""Number of runs of each way before one is chosen."""
_HOPELESS = 1.2
"""Ratio to the shortest median step from which on a way is tried only once."""
_STEPS = 500
"""Number of steps with the chosen way before all ways are tried again, because loops change."""


class Choice(Protocol):
    """Decides how the next step's reads are made.

    Attributes:
        way: the way; None: each forward makes its own reads.
    """

    way: Way | None

    def offer(self, ways: Sequence[Way]) -> None:
        """Choose from now on among these ways and no way at all; the first one is tried first.

        Args:
            ways: the ways in which a graph's calls can be made ahead.
        """

    def loop_began(self, depth: int) -> None:
        """Note that a loop began, so the time until the next end of a step is more than a step's.

        Args:
            depth: number of batches that are fetched before their step.
        """

    def step_ended(self) -> None:
        """Note the end of a step, and decide how the next step's reads are made."""


class InTurn(Choice):
    """Uses another way in each step, so that a few steps show all of them."""

    def __init__(self) -> None:
        self._ways: deque[Way | None] = deque([None])
        self.way: Way | None = None

    @override
    def offer(self, ways: Sequence[Way]) -> None:
        self._ways = deque((*ways, None))
        self.way = ways[0]

    @override
    def step_ended(self) -> None:
        self._ways.rotate(-1)
        self.way = self._ways[0]


class MeasuredChoice(Choice):
    """Tries the ways in turn, and keeps the one with the shortest median step."""

    def __init__(self) -> None:
        self._ways: tuple[Way | None, ...] = (Way.NOTHING_WRITTEN, None)
        self._depth = 1
        """Number of steps that still have batches read by the previous way."""
        self._last_s: float | None = None
        self._begin()

    @override
    def offer(self, ways: Sequence[Way]) -> None:
        offered = (*ways, None)
        if offered != self._ways:
            self._ways = offered
            self._begin()

    @override
    def loop_began(self, depth: int) -> None:
        self._last_s, self._depth = None, depth

    @override
    def step_ended(self) -> None:
        now, before = time.perf_counter(), self._last_s
        self._last_s = now
        if before is None:
            return
        self._step += 1
        if not self._runs:
            if self._step >= _STEPS:
                self._begin()
            return
        if self._step > self._depth:
            self._took_s[self.way].append(now - before)
        if self._step >= self._depth + _RUN:
            self._runs.popleft()
            self._next()

    def _begin(self) -> None:
        self._rounds = 0
        self._step = 0
        self._took_s: dict[Way | None, list[float]] = {each: [] for each in self._ways}
        self._runs: deque[Way | None] = deque(self._ways)
        self.way = self._ways[0]

    def _next(self) -> None:
        """Begin the next run; after the last, begin the steps with the fastest way."""
        self._step = 0
        if self._runs:
            self.way = self._runs[0]
            return
        self._rounds += 1
        median_s = {way: statistics.median(took) for way, took in self._took_s.items()}
        self.way = min(self._ways, key=lambda way: median_s[way])
        hopeful = [way for way in self._ways if median_s[way] < _HOPELESS * median_s[self.way]]
        if self._rounds < _ROUNDS and len(hopeful) > 1:
            self._runs.extend(hopeful)
            self.way = hopeful[0]
