"""The service's clock, which judges the age of timestamps of the wall clock even if that clock jumps.

Timestamps are wall time, since they outlast a restart and people read them. An age is not the difference between a
timestamp and the present wall time: a clock that jumps a year ahead would make everything that is stored a year old. So
the service counts its own time by a clock that never jumps, and records the wall clock's reading whenever the two
diverge. From these records follows the lowest reading of the wall clock within a given number of seconds; anything with
a lower timestamp is certainly older.

If the host was restarted, only the wall clock knows how long it was off. It is trusted for up to a day.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FILE: Final = "clock.json"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_JUMP_S: Final = 30.0
"""Seconds by which the wall clock may drift from the steady one, or be set, without being recorded as a jump."""
_LONGEST_OFF_S: Final = 24 * 3600.0
"""The longest time in seconds for which a host is taken to have been off on the word of the wall clock alone."""
_MOST_JUMPS: Final = 1_000

logger = logging.getLogger(__name__)


def steady_s() -> float:
    """Return the seconds since the host was started, including the time for which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the id of the host's present boot, or "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class SharedTime:
    """The time of a database that several services share, whose hosts' clocks may differ by any amount.

    It is asked for now and then, and counted on in between; what a new answer changes is a jump, as of any wall clock.

    Args:
        ask: returns the database's time, in seconds since the epoch.
    """

    def __init__(self, ask: Callable[[], float]) -> None:
        self._ask = ask
        self.ask()

    def __call__(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self._at_start + steady_s()

    def ask(self) -> None:
        """Ask the database again; this raises whatever its function raises."""
        asked_s = steady_s()
        found = self._ask()
        self._at_start = found - (asked_s + steady_s()) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Jump:
    """The wall clock's reading after a jump, in seconds since the epoch, at a second of the service's own time."""

    at: float
    wall: float


class Clock:
    """Reads the time, and judges the age of timestamps.

    Args:
        folder: the folder for the file that keeps jumps across restarts; None keeps them in memory only.
        wall: returns the wall time, in seconds since the epoch.
        steady: returns a time that never jumps while `boot` stays the same, in seconds.
        boot: returns an id of the period in which `steady` does not jump.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_s,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        self._path = None if folder is None else folder / _FILE
        self._wall, self._steady, self._boot = wall, steady, boot()
        self._lock = threading.Lock()
        self._own = 0.0  # the service's own time when the steady clock read `_seen`
        self._seen = steady()
        self._jumps = [_Jump(at=0.0, wall=wall())]
        self._recall()
        self.observe()

    def now(self) -> float:
        """Return the wall time, in seconds since the epoch, for a timestamp; an earlier jump is recorded first."""
        with self._lock:
            own, wall = self._elapsed(), self._wall()
            if abs(self._ahead(own, wall)) > _JUMP_S:
                self._note(own, wall)
        return wall

    def before(self, age_s: float) -> float:
        """Return the wall time below which every timestamp is older than `age_s` seconds, whatever the clock did since.

        Timestamps older than the clock's own record are trusted: minus infinity is never returned.
        """
        with self._lock:
            own, wall = self._elapsed(), self._wall()
            self._note(own, wall)
        since = own - age_s
        then = [jump for jump in self._jumps if jump.at <= since]
        last = then[-1] if then else self._jumps[0]
        # A change too small to be recorded may lie between a jump and its record.
        after = (jump.wall - _JUMP_S for jump in self._jumps[1:] if jump.at > since)
        readings = [last.wall + since - last.at, *after]
        return min(wall - age_s, *readings)

    def observe(self) -> None:
        """Record a jump of the wall clock since the last look, if there was one, and store what both clocks read."""
        with self._lock:
            self._note(self._elapsed(), self._wall())

    def _ahead(self, own: float, wall: float) -> float:
        """Return by how much the wall clock is ahead of where it would be without a jump since the last record."""
        last = self._jumps[-1]
        return wall - (last.wall + own - last.at)

    def _note(self, own: float, wall: float) -> None:
        ahead = self._ahead(own, wall)
        if abs(ahead) > _JUMP_S:
            logger.warning("the clock of this host has jumped by %+.0f s; nothing is older or younger for it", ahead)
            self._jumps = [*self._jumps, _Jump(at=own, wall=wall)][-_MOST_JUMPS:]
        self._own, self._seen = own, self._steady()
        self._store(wall)

    def _elapsed(self) -> float:
        return self._own + max(0.0, self._steady() - self._seen)

    def _recall(self) -> None:
        """Resume the service's own time where it was left."""
        if self._path is None:
            return
        try:
            state = json.loads(self._path.read_text())
            jumps = [_Jump(at=float(at), wall=float(wall)) for at, wall in state["jumps"]]
            own, seen, wall = float(state["own"]), float(state["steady"]), float(state["wall"])
            same = bool(self._boot) and state["boot"] == self._boot
        except (OSError, ValueError, KeyError, TypeError):
            return
        off_s = self._seen - seen if same else min(self._wall() - wall, _LONGEST_OFF_S)
        if jumps:
            self._own, self._jumps = own + max(0.0, off_s), jumps

    def _store(self, wall: float) -> None:
        if self._path is None:
            return
        state = {
            "boot": self._boot,
            "steady": self._seen,
            "own": self._own,
            "wall": wall,
            "jumps": [(jump.at, jump.wall) for jump in self._jumps],
        }
        unfinished = self._path.with_suffix(".part")
        try:
            with unfinished.open("w") as file:
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._path)
        except OSError as error:  # the steady clock covers for the readings that were not stored
            logger.debug("the clock's jumps cannot be stored: %s", error)
            with suppress(OSError):
                unfinished.unlink()
