"""How long a replaying server takes: the recorded times, so many calls at once, and the links to and from it."""

from __future__ import annotations

import hashlib
import heapq
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from fxlib.spec.profile import ServerProfile, Spread
from fxlib_workers.trial.replay.plan import Line

_LEAST_SLEEP_S: Final = 20e-6
_MOST_SLOTS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What this trial's own network takes for a call, of which replay takes so much less."""

    call_s: float = 0.0
    byte_s: float = 0.0
    item_s: float = 0.0
    """For each further call of a batch whose calls run side by side."""

    def of(self, line: Line) -> float:
        """Seconds of a call that is answered at once."""
        return self.call_s + self.byte_s * (line.request_bytes + line.response_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A call's place among those of its batch, from 0, and whether they run side by side."""

    place: int = 0
    side_by_side: bool = False


ALONE: Final = Turn()
"""Of a call that came by itself."""


class Pace:
    """Times of one server. Safe for threads.

    A call's recorded time is divided: its bytes pass the link to the server and the link back, one message after
    another; its work takes one of `concurrency` places, in order of arrival; what is left is latency, which holds
    nothing up. What the trial's own network takes is taken off.

    Args:
        profile: the server's figures.
        seed: of the times that are drawn.
    """

    def __init__(self, profile: ServerProfile, seed: int) -> None:
        self.wire = Wire()
        self._profile = profile
        self._seed = seed
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget how often each call was made: the same times are drawn again."""
        with self._lock:
            self._made: Counter[str] = Counter()
            self._places = [-math.inf] * min(self._profile.concurrency, _MOST_SLOTS)
            self._request_link = self._response_link = -math.inf

    def serve(self, name: str, line: Line, *, arrived: float, turn: Turn = ALONE) -> None:
        """Return when a call's work is done and its reply has passed the link.

        Args:
            name: of the call: its times are drawn by this name and by how often it was made.
            line: what was recorded.
            arrived: when the call arrived, on `time.perf_counter`.
            turn: its place in a batch. All but the first came with the first's message; of those that run side by side,
                each adds to the batch what the profile says of further calls.
        """
        more_s = self._more_s() if turn.place and turn.side_by_side else None
        # What makes one message slow makes its calls slow together: the first of them draws for all.
        service_s = self._draw(name, line.service_s) if more_s is None else line.service_s.median
        share = self._shares(service_s, line)
        with self._lock:
            self._request_link = landed = max(arrived, self._request_link) + share.request_s
            work_s = share.work_s if more_s is None else more_s
            done = max(landed, self._places[0]) + work_s
            heapq.heapreplace(self._places, done)
        if more_s is not None:
            done = max(done, landed + share.work_s + turn.place * more_s)
        sleep_until(done)
        with self._lock:
            self._response_link = sent = max(done, self._response_link) + share.response_s
        sleep_until(sent + (0.0 if turn.place else share.latency_s))

    def _more_s(self) -> float | None:
        """Return what a further call adds to a batch besides what it adds in this trial by itself; None if unknown."""
        recorded_s = self._profile.per_item_s
        return None if recorded_s is None else max(0.0, recorded_s - self.wire.item_s)

    def _draw(self, name: str, spread: Spread) -> float:
        with self._lock:
            count = self._made[name]
            self._made[name] += 1
        drawn = hashlib.blake2b(f"{self._seed}/{name}/{count}".encode(), digest_size=8).digest()
        return at(spread, int.from_bytes(drawn, "big") / 2**64)

    def _shares(self, service_s: float, line: Line) -> _Shares:
        rate, trip_s = self._profile.bytes_per_s, self._profile.round_trip_s
        request_s, response_s = line.request_bytes / rate, line.response_bytes / rate
        work_s = max(0.0, service_s - trip_s - request_s - response_s)
        # Of the recorded time there is left what the trial's own network does not take: first work, then transfers.
        left_s = max(0.0, service_s - self.wire.of(line))
        work_s = min(work_s, left_s)
        response_s = min(response_s, left_s - work_s)
        request_s = min(request_s, left_s - work_s - response_s)
        return _Shares(
            request_s=request_s,
            work_s=work_s,
            response_s=response_s,
            latency_s=left_s - work_s - response_s - request_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    request_s: float
    work_s: float
    response_s: float
    latency_s: float


def at(spread: Spread, share: float) -> float:
    """Return the value below which this share, 0 to 1, of the measurements lies: between quantiles, in proportion."""
    place = share * (len(spread.quantiles) - 1)
    below = min(int(place), len(spread.quantiles) - 1)
    above = min(below + 1, len(spread.quantiles) - 1)
    low, high = spread.quantiles[below], spread.quantiles[above]
    return low + (high - low) * (place - below)


def sleep_until(moment: float) -> None:
    """Return at a moment on `time.perf_counter`, or at once if it is over."""
    left_s = moment - time.perf_counter()
    if left_s > _LEAST_SLEEP_S:
        time.sleep(left_s)
