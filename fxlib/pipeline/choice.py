"""Choose the fastest of several exact ways to make reads, measured while the loop runs on its own servers."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeAlias

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


_Option: TypeAlias = tuple[Way | None, bool]
"""A way, and whether rows that are read by keys are updated in the trainer."""


class Choice(Protocol):
    """Decides how the next step's reads are made.

    Attributes:
        way: the way; None: each forward makes its own reads.
        updates: whether rows that are read by keys come with their state, so that pushes can be made on them here.
    """

    way: Way | None
    updates: bool

    def offer(self, ways: Sequence[Way], *, updates: bool = False) -> None:
        """Choose from now on among these ways and no way at all; the first one is tried first.

        Args:
            ways: the ways in which a graph's calls can be made ahead.
            updates: whether rows that are read by keys can be updated here, which is one more option.
        """

    def loop_began(self, depth: int) -> None:
        """Note that a loop began, so the time until the next end of a step is more than a step's.

        Args:
            depth: number of batches that are fetched before their step.
        """

    def step_ended(self) -> None:
        """Note the end of a step, and decide how the next step's reads are made."""


def _options(ways: Sequence[Way], *, updates: bool) -> tuple[_Option, ...]:
    updated: list[_Option] = [(each, True) for each in ways if each is Way.BY_KEYS and updates]
    return (*updated, *((each, False) for each in (*ways, None)))


class InTurn(Choice):
    """Uses another way in each step, or in every second one, so that a few steps show all of them."""

    def __init__(self) -> None:
        self._options: deque[_Option] = deque([(None, False)])
        self.way: Way | None = None
        self.updates = False

    @override
    def offer(self, ways: Sequence[Way], *, updates: bool = False) -> None:
        # An update takes the rows that the step before was read with, so that one step alone would show none.
        options = _options(ways, updates=updates)
        self._options = deque(each for each in options for _ in range(1 + each[1]))
        self.way, self.updates = self._options[0]

    @override
    def step_ended(self) -> None:
        self._options.rotate(-1)
        self.way, self.updates = self._options[0]


class MeasuredChoice(Choice):
    """Tries the ways in turn, and keeps the one with the shortest median step."""

    def __init__(self) -> None:
        self._options = _options([Way.NOTHING_WRITTEN], updates=False)
        self._depth = 1
        """Number of steps that still have batches read by the previous way."""
        self._last_s: float | None = None
        self._begin()

    @override
    def offer(self, ways: Sequence[Way], *, updates: bool = False) -> None:
        offered = _options(ways, updates=updates)
        if offered != self._options:
            self._options = offered
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
            self._took_s[self.way, self.updates].append(now - before)
        if self._step >= self._depth + _RUN:
            self._runs.popleft()
            self._next()

    def _begin(self) -> None:
        self._rounds = 0
        self._step = 0
        self._took_s: dict[_Option, list[float]] = {each: [] for each in self._options}
        self._runs: deque[_Option] = deque(self._options)
        self.way, self.updates = self._options[0]

    def _next(self) -> None:
        """Begin the next run; after the last, begin the steps with the fastest way."""
        self._step = 0
        if self._runs:
            self.way, self.updates = self._runs[0]
            return
        self._rounds += 1
        median_s = {option: statistics.median(took) for option, took in self._took_s.items()}
        fastest = min(self._options, key=lambda option: median_s[option])
        hopeful = [each for each in self._options if median_s[each] < _HOPELESS * median_s[fastest]]
        again = self._rounds < _ROUNDS and len(hopeful) > 1
        self._runs.extend(hopeful if again else ())
        self.way, self.updates = hopeful[0] if again else fastest
