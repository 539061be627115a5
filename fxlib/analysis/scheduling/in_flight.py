"""What is in flight while a schedule is made: when answers are expected, and whether a limit lets another call go."""

from __future__ import annotations

from dataclasses import dataclass

from fxlib.analysis.cost.costs import Costs, Message
from fxlib.analysis.cost.network import Network


@dataclass(slots=True)
class _Load:
    """What is in flight to one destination, or to all of them."""

    calls: int = 0
    size: int = 0


class InFlight:
    """Messages between their issues and their waits."""

    def __init__(self, costs: Costs, limits: Limits, held_bytes: int | None) -> None:
        """Begin with nothing in flight; results in flight may take `held_bytes` together, if that is given."""
        self._network = Network(costs.servers)
        self._limits = limits
        self._held_bytes = held_bytes
        self._all = _Load()
        self._loads: dict[str, _Load] = {}
        self._expected: dict[int, tuple[Message, float]] = {}

    def admits(self, message: Message) -> bool:
        """Whether the limits let a message go now. One that is larger than a limit goes alone."""
        load, limits = self._loads.get(message.to), self._limits
        if self._held_bytes is not None and self._all.calls and self._all.size + _size(message) > self._held_bytes:
            return False
        if load is None or not load.calls:
            return True
        if limits.calls_in_flight is not None and load.calls >= limits.calls_in_flight:
            return False
        return limits.bytes_in_flight is None or load.size + _size(message) <= limits.bytes_in_flight

    def send(self, place: int, message: Message, now_s: float) -> float:
        """Let a message go; return when its answer is expected."""
        expected = self._network.send(message, now_s).expected_s
        self._expected[place] = message, expected
        for load in (self._all, self._loads.setdefault(message.to, _Load())):
            load.calls += 1
            load.size += _size(message)
        return expected

    def remove(self, place: int) -> None:
        """Remove a message that was waited for; further waits for it change nothing."""
        found = self._expected.pop(place, None)
        if found is None:
            return
        for load in (self._all, self._loads[found[0].to]):
            load.calls -= 1
            load.size -= _size(found[0])


def _size(message: Message) -> int:
    return message.request_bytes + message.response_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Hard limits; None is no limit. A single message larger than a limit goes alone."""

    memory_bytes: int | None = None
    """Bytes of values held at once, beyond what the program holds in the order in which it was written."""
    calls_in_flight: int | None = None
    """Number of messages in flight to each destination."""
    bytes_in_flight: int | None = None
    """Bytes of arguments and results in flight to each destination."""

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return any(each is not None for each in (self.memory_bytes, self.calls_in_flight, self.bytes_in_flight))

    @property
    def of_flight(self) -> bool:
        """Whether a limit holds for each destination, which the runtime enforces too."""
        return self.calls_in_flight is not None or self.bytes_in_flight is not None


UNLIMITED = Limits()
