"""How many threads are worth it for calls of a function that came together.

Threads that wait, for a disk, another process or their service time, leave the core to others; threads that work on
small tensors pass the interpreter's lock to each other at every operator, which takes longer than the operator. So a
server needs as many threads as keep the lock busy: one, and as many more as a call waits longer than it works. This is
the size of a thread pool in B. Goetz et al., "Java Concurrency in Practice", 8.2, with the interpreter's lock in place
of the processors where calls work briefly. `python -m benchmarks.side_by_side` measures it.

How long a call waits shows when it runs by itself. So the first call of a batch does so now and then, and seldom where
that made others wait. Of calls that run one after another, the first of each function shows it, one behind a call that
was not brief, and any that lasts long. Once a call has lasted long, whatever is usual, all those behind it run side by
side, so that a message takes no longer than one such call more than if none had waited for another.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque

from fxlib.utils.hardware import cores

THREADS = 16
"""Number of threads that share the calls of all batches of this process, besides those that received the batches; an
RPC agent has as many."""
BRIEF_S = 2e-4
"""Duration of a call, in seconds, below which it is not worth waking a thread for it."""
_SURELY_S = 1e-2
"""Duration of a call, in seconds, from which on others like it run side by side without a look: no lock explains it."""
_WORKS_S = 1e-3
"""Processor time of a call, in seconds, from which on its operators are taken to be long ones, which run without the
interpreter's lock."""
_SELDOM = 64
"""Largest number of batches from one look at a call to the next."""
_CHANGED, _SOON = 2.0, 4
"""Ratio of a call's duration to the usual one from which on the next look comes after so many batches at most."""
_FORGET = 1.1
"""Factor by which the shortest duration seen grows with each later call."""
_LATEST = 3
"""Number of calls of which the briefest counts as usual: another one may be longer because its core was taken away."""
LONG_S = 1e-3
"""Time in seconds for which a call that usually works may wait before those behind it run side by side."""


class Look:
    """The time, and the processor time of the calling thread, at the moment at which the object is made."""

    __slots__ = ("_time_s", "_worked_s")

    def __init__(self) -> None:
        self._time_s, self._worked_s = time.perf_counter(), time.thread_time()

    def waited_s(self, since: Look) -> float:
        """Return how long the thread has taken no processor time since an earlier look."""
        return (self._time_s - since._time_s) - (self._worked_s - since._worked_s)


class Pace:
    """How calls of one function spend their time, as far as this process has seen; threads may share it."""

    __slots__ = ("_by_themselves", "_left", "_shortest_s", "_without_look")

    def __init__(self) -> None:
        self._shortest_s = math.inf
        """Recent duration of a call: the shortest one, which counts for less with each later call."""
        self._by_themselves: deque[tuple[float, float]] = deque(maxlen=_LATEST)
        """How long the latest calls that ran by themselves waited and worked, in seconds."""
        self._without_look = 1
        """Number of batches that are to follow without a look, once one has made calls wait."""
        self._left = 0
        """Number of them that are still to come."""

    def threads(self) -> int:
        """Return how many threads are to run the calls of a batch; 1 if they are to run one after another at first."""
        if self._shortest_s >= _SURELY_S:
            return THREADS
        if self._left > 0:
            if self._by_themselves and self._shortest_s > _CHANGED * sum(self._usual()):
                self._left = min(self._left, _SOON)
            self._left -= 1
            return self._needed()
        return 1

    def ran(self, lasted_s: float) -> int:
        """Note how long a call lasted, whatever ran beside it; return how many threads are worth it for the others."""
        self._shortest_s = min(lasted_s, _FORGET * self._shortest_s)
        return THREADS if lasted_s >= _SURELY_S else 1

    def ran_by_itself(self, lasted_s: float, waited_s: float, running: int) -> int:
        """Note how a call spent its time; return how many threads are worth it for those behind it.

        Args:
            lasted_s: how long it lasted, in seconds.
            waited_s: how long its thread has taken no processor time since the look before, in seconds.
            running: number of threads of this process that ran calls at that time, of other batches, too; each of the
                others is taken to have held the interpreter's lock for as long as this one took processor time.
        """
        works_s = max(0.0, lasted_s - waited_s)
        waits_s = max(0.0, lasted_s - running * works_s)
        self._by_themselves.append((waits_s, works_s))
        usual = self._needed()
        long = self.ran(lasted_s)
        return THREADS if usual == 1 and waits_s >= LONG_S else max(usual, long)

    def _needed(self) -> int:
        if not self._by_themselves:
            return THREADS
        waits_s, works_s = self._usual()
        if waits_s + works_s < BRIEF_S:
            return 1
        busy = _cores() if works_s >= _WORKS_S else 1
        return min(THREADS, round(busy * (1 + waits_s / max(works_s, 1e-6))))

    def _usual(self) -> tuple[float, float]:
        return min(list(self._by_themselves), key=sum)

    def looked(self, *, in_turn: bool) -> None:
        """Note that a batch has ended whose first calls ran one after another; `in_turn` if all of them did."""
        if in_turn or self._needed() == 1:
            self._without_look = max(1, self._without_look // 2)
        else:
            self._without_look = self._left = min(_SELDOM, 2 * self._without_look)


_cores = functools.cache(cores)
