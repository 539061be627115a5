"""The times of a replaying server: recorded times, a number of concurrent calls, and the links to and from it."""

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
from fxlib_workers.trial.replay.plan import RecordedCall

_LEAST_SLEEP_S: Final = 20e-6
_MOST_SLOTS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCost:
    """The cost of a call in the trial's own network, which replay subtracts from the recorded time.

    Attributes:
        call_s: the seconds of each call.
        byte_s: the seconds of each byte of request and response.
        item_s: the seconds of each further call in a batch whose calls run concurrently.
    """

    call_s: float = 0.0
    byte_s: float = 0.0
    item_s: float = 0.0

    def of(self, recorded: RecordedCall) -> float:
        """Return the seconds of a call that is answered at once."""
        return self.call_s + self.byte_s * (recorded.request_bytes + recorded.response_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPosition:
    """The position of a call in its batch.

    Attributes:
        index: the call's index in the batch.
        concurrent: whether the calls of the batch run concurrently.
    """

    index: int = 0
    concurrent: bool = False


NOT_BATCHED: Final = BatchPosition()
"""The position of a call that came on its own."""


class LatencyModel:
    """The times of one server's calls. It may be used by several threads.

    A call's recorded time is divided: its bytes pass the link to the server and the link back, one message after
    another; its work occupies one of `concurrency` slots, in order of arrival; the rest is latency, which delays no
    other call for which the process has a thread. The cost of the trial's own network is subtracted.

    Args:
        profile: the server's figures.
        seed: the seed of the times that are drawn.
    """

    def __init__(self, profile: ServerProfile, seed: int) -> None:
        self.network = NetworkCost()
        self._profile = profile
        self._seed = seed
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Reset the count of each call, so that the same times are drawn again."""
        with self._lock:
            self._made: Counter[str] = Counter()
            self._slots = [-math.inf] * min(self._profile.concurrency, _MOST_SLOTS)
            self._request_link = self._response_link = -math.inf

    def serve(
        self, name: str, recorded: RecordedCall, *, arrived: float, position: BatchPosition = NOT_BATCHED
    ) -> None:
        """Return when a call's work is done and its reply has passed the link.

        Args:
            name: the call's name, which decides the drawn time together with the number of times that the call was
                made.
            recorded: the profile's record of the call.
            arrived: the time at which the call arrived, on `time.perf_counter`.
            position: its position in a batch. All calls but the first came with the first one's message. Each further
                call that runs concurrently adds to the batch the time that the profile gives for further calls.
        """
        more_s = self._more_s() if position.index and position.concurrent else None
        # A slow message is slow for all of its calls, so the first of them draws for all.
        service_s = self._draw(name, recorded.service_s) if more_s is None else recorded.service_s.median
        share = self._shares(service_s, recorded)
        with self._lock:
            self._request_link = landed = max(arrived, self._request_link) + share.request_s
            work_s = share.work_s if more_s is None else more_s
            done = max(landed, self._slots[0]) + work_s
            heapq.heapreplace(self._slots, done)
        if more_s is not None:
            done = max(done, landed + share.work_s + position.index * more_s)
        sleep_until(done)
        with self._lock:
            self._response_link = sent = max(done, self._response_link) + share.response_s
        sleep_until(sent + (0.0 if position.index else share.latency_s))

    def _more_s(self) -> float | None:
        """Return the seconds that a further call adds to a batch beyond the trial's network; None if unknown."""
        recorded_s = self._profile.per_item_s
        return None if recorded_s is None else max(0.0, recorded_s - self.network.item_s)

    def _draw(self, name: str, spread: Spread) -> float:
        with self._lock:
            count = self._made[name]
            self._made[name] += 1
        drawn = hashlib.blake2b(f"{self._seed}/{name}/{count}".encode(), digest_size=8).digest()
        return at(spread, int.from_bytes(drawn, "big") / 2**64)

    def _shares(self, service_s: float, recorded: RecordedCall) -> _Shares:
        rate, trip_s = self._profile.bytes_per_s, self._profile.round_trip_s
        request_s, response_s = recorded.request_bytes / rate, recorded.response_bytes / rate
        work_s = max(0.0, service_s - trip_s - request_s - response_s)
        # The trial's own network takes part of the recorded time: latency is reduced first, then transfers, then work.
        left_s = max(0.0, service_s - self.network.of(recorded))
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
    """Return the value below which a share (0 to 1) of the measurements lies, interpolated between quantiles."""
    index = share * (len(spread.quantiles) - 1)
    below = min(int(index), len(spread.quantiles) - 1)
    above = min(below + 1, len(spread.quantiles) - 1)
    low, high = spread.quantiles[below], spread.quantiles[above]
    return low + (high - low) * (index - below)


def sleep_until(moment: float) -> None:
    """Sleep until a time on `time.perf_counter`; return at once if it has passed."""
    left_s = moment - time.perf_counter()
    if left_s > _LEAST_SLEEP_S:
        time.sleep(left_s)
