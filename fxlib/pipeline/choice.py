"""Choose the fastest of several exact ways to make reads, and how early, measured while a loop runs on its servers."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from typing_extensions import override

from fxlib.analysis.effects.prologue import Way

_RUN = 5
"""Number of steps that one way is tried for, besides the steps that still have batches read by the way before."""
_ROUNDS = 2
"""Number of runs of each way before one is chosen."""
_HOPELESS = 1.2
"""Ratio to the shortest median step from which on a way is tried only once."""
_DEEPER = 0.95
"""Ratio to the median step so far up to which steps with twice the depth are worth the batches that they hold."""
_STEPS = 500
"""Number of steps with the chosen way before all ways are tried again, because loops change."""
MOST_DEPTH = 8
"""Number of batches that are fetched before their step at most, if the loop leaves it open."""


_Option: TypeAlias = tuple[Way | None, bool]
"""A way, and whether rows that are read by keys are updated in the trainer."""


class _Run(NamedTuple):
    """Steps that make their reads in one way and at one depth, and are timed together."""

    option: _Option
    depth: int


class Choice(Protocol):
    """Decides how the next step's reads are made.

    Attributes:
        way: the way; None: each forward makes its own reads.
        updates: whether rows that are read by keys come with their state, so that pushes can be made on them here.
        depth: number of batches that are fetched before their step.
    """

    way: Way | None
    updates: bool
    depth: int

    def offer(self, ways: Sequence[Way], *, updates: bool = False) -> None:
        """Choose from now on among these ways and no way at all; the first one is tried first.

        Args:
            ways: the ways in which a graph's calls can be made ahead.
            updates: whether rows that are read by keys can be updated here, which is one more option.
        """

    def loop_began(self, depth: int | None) -> None:
        """Note that a loop began, so the time until the next end of a step is more than a step's.

        Args:
            depth: number of batches that are fetched before their step; None: it is chosen, too.
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
        self.depth = 1

    @override
    def offer(self, ways: Sequence[Way], *, updates: bool = False) -> None:
        # An update takes the rows that the step before was read with, so that one step alone would show none.
        options = _options(ways, updates=updates)
        self._options = deque(each for each in options for _ in range(1 + each[1]))
        self.way, self.updates = self._options[0]

    @override
    def loop_began(self, depth: int | None) -> None:
        self.depth = depth or 1

    @override
    def step_ended(self) -> None:
        self._options.rotate(-1)
        self.way, self.updates = self._options[0]


class MeasuredChoice(Choice):
    """Tries the ways in turn, keeps the one with the shortest median step, and doubles the depth while that pays."""

    def __init__(self) -> None:
        self._options = _options([Way.NOTHING_WRITTEN], updates=False)
        self._given: int | None = 1
        """The depth that the loop asks for; None: it is chosen, too."""
        self._last_s: float | None = None
        self.depth = 1
        self._begin()

    @override
    def offer(self, ways: Sequence[Way], *, updates: bool = False) -> None:
        offered = _options(ways, updates=updates)
        if offered != self._options:
            self._options = offered
            self._begin()

    @override
    def loop_began(self, depth: int | None) -> None:
        self._last_s = None
        if depth != self._given:
            self._given = depth
            self._begin()

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
        if self._step > self._left:
            self._took_s[self._runs[0]].append(now - before)
        if self._step >= self._left + _RUN:
            self._runs.popleft()
            self._next()

    def _begin(self) -> None:
        self._rounds = 0
        self._took_s: defaultdict[_Run, list[float]] = defaultdict(list)
        self._runs = deque(_Run(each, self._given or 1) for each in self._options)
        self._start(self._runs[0])

    def _start(self, run: _Run) -> None:
        self._step = 0
        self._left = max(self.depth, run.depth)
        """Number of steps that still have batches read by the previous way."""
        (self.way, self.updates), self.depth = run

    def _next(self) -> None:
        """Begin the next run; after the last, begin the steps with the fastest way."""
        if not self._runs:
            median_s = {run: statistics.median(took) for run, took in self._took_s.items()}
            fastest = min(median_s, key=lambda run: median_s[run] / _DEEPER ** math.log2(run.depth))
            self._rounds += 1
            hopeful = [run for run in median_s if median_s[run] < _HOPELESS * median_s[fastest]]
            deeper = fastest._replace(depth=2 * fastest.depth)
            if self._rounds < _ROUNDS and len(hopeful) > 1:
                self._runs.extend(hopeful)
            elif self._given is None and fastest.option[0] and deeper.depth <= MOST_DEPTH and deeper not in median_s:
                self._rounds = _ROUNDS
                self._runs.append(deeper)
            else:
                self._start(fastest)
                return
        self._start(self._runs[0])
