"""Servers and the links to them, as a queueing model: when a message is sent, served, and answered.

A request crosses the trainer's link and its server's, first come, first served, and so does the answer on the way back:
a small answer behind a large one waits for it. A server works on a limited number of messages at once. The RPC layer's
own work on them (on trainer and servers, if they share a machine) is done for one message at a time. All times are
seconds of one clock, the trainer's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping

from fxlib.analysis.cost.costs import MessageCost
from fxlib.spec.profile import ServerProfile


class Trip:
    """One message on its way. `arrived_s` is None until it is known; `expected_s` ignores other answers."""

    __slots__ = ("arrived_s", "expected_s", "issued_s", "message", "sent_s", "served_s", "started_s")

    def __init__(self, message: MessageCost, issued_s: float) -> None:
        """Start the trip at the end of the issue."""
        self.message = message
        self.issued_s = issued_s
        self.sent_s = self.started_s = self.served_s = self.expected_s = issued_s
        self.arrived_s: float | None = None


class _Destination:
    __slots__ = ("bytes_per_s", "in_free_s", "out_free_s", "workers_free_s")

    def __init__(self, server: ServerProfile) -> None:
        self.bytes_per_s = server.bytes_per_s
        self.workers_free_s = [0.0] * server.concurrency
        self.out_free_s = 0.0
        self.in_free_s = 0.0


class Network:
    """All servers of a program, and what is in flight to them. Messages are sent in the order of their issues."""

    def __init__(self, servers: Mapping[str, ServerProfile]) -> None:
        """Begin with nothing in flight."""
        self._destinations = {name: _Destination(server) for name, server in servers.items()}
        self._fastest = max((server.bytes_per_s for server in servers.values()), default=1.0)
        self._out_free_s = 0.0
        self._in_free_s = 0.0
        self._intake_free_s = 0.0
        self._answers: list[tuple[float, int, Trip]] = []
        self._numbers = itertools.count()

    def send(self, message: MessageCost, now_s: float) -> Trip:
        """Send a message whose issue ends now, not before those sent already.

        An issue holds the interpreter's lock, so the RPC layer accepts nothing meanwhile.
        """
        trip, to = Trip(message, now_s), self._destinations[message.to]
        self._intake_free_s = max(now_s - message.issue_s, self._intake_free_s) + message.issue_s
        self._out_free_s = max(now_s, self._out_free_s) + message.request_bytes / self._fastest
        to.out_free_s = max(now_s, to.out_free_s) + message.request_bytes / to.bytes_per_s
        trip.sent_s = max(self._out_free_s, to.out_free_s)
        reached_s = trip.sent_s + message.latency_s / 2
        trip.started_s = max(reached_s, heapq.heappop(to.workers_free_s))
        trip.served_s = trip.started_s + message.work_s
        heapq.heappush(to.workers_free_s, trip.served_s)
        way_back_s = message.latency_s / 2 + message.response_bytes / to.bytes_per_s
        trip.expected_s = trip.served_s + way_back_s + message.intake_s
        heapq.heappush(self._answers, (trip.served_s, next(self._numbers), trip))
        return trip

    def arrival_s(self, trip: Trip) -> float:
        """Return when the answer to a message arrives, in seconds; everything issued before that time must be known."""
        while trip.arrived_s is None:
            self._answer(heapq.heappop(self._answers)[-1])
        return trip.arrived_s

    def answered_by(self, now_s: float) -> Iterator[Trip]:
        """Deliver all answers that were served by now, and yield their messages."""
        while self._answers and self._answers[0][0] <= now_s:
            trip = heapq.heappop(self._answers)[-1]
            self._answer(trip)
            yield trip

    def _answer(self, trip: Trip) -> None:
        message, to = trip.message, self._destinations[trip.message.to]
        self._in_free_s = max(trip.served_s, self._in_free_s) + message.response_bytes / self._fastest
        to.in_free_s = max(trip.served_s, to.in_free_s) + message.response_bytes / to.bytes_per_s
        reached_s = max(self._in_free_s, to.in_free_s) + message.latency_s / 2
        self._intake_free_s = max(reached_s, self._intake_free_s) + message.intake_s
        trip.arrived_s = self._intake_free_s
