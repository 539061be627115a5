"""The order in which a program overlaps its remote calls with its own work.

This is list scheduling over the dependencies, against a clock that the costs advance. Whenever several nodes are ready,
the first of these goes next:

1. issues of calls that may start early, as far as the limits admit them, longest tail first,
2. waits whose answers are expected to be there, and which hold up an issue, a write or a fence,
3. the work that issues still need, that with the longest tail first,
4. other work, writes on servers among it, in program order,
5. waits, in the order in which their answers are expected.

If it was never measured when an answer arrives, its wait goes after all work needed by issues that need no answer: a
guess must not keep a call from being issued. Such waits are ordered by what they hold up, longest tail first, and those
that hold up nothing by the order in which the program needs them.

Before it begins a piece of other work, the planner checks whether an answer that holds something up is expected
meanwhile, and waits for it if that ends the forward earlier. If calls rather than work determine the length of the
forward, the clock stretches the work until it fills the time. The hidden time is then shared among calls that depend on
one another, instead of being spent on the first, and the plan stays right even if work takes longer than expected.

The plan issues nothing that the program would not issue, breaks ties by program order, and depends on the graph and its
costs alone. O((n + e) log n), with heaps of ready nodes.

The *tail* of a node is the longest path from its start to the end of the forward, through work and calls in flight: a
node with more tail has less slack. A node is *urgent* if an issue, a write or a fence comes after it with no wait in
between; then its urgency is that one's tail.

Sources: list scheduling by critical path (Coffman and Graham, 1972), with "what unblocks a transfer first" (Hashemi et
al., TicTac, MLSys 2019); XLA's latency-hiding scheduler (openxla/xla, xla/service/latency_hiding_scheduler.cc) has a
clock of this kind.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from fxlib.analysis.cost.costs import Costs, MessageCost, issue_of
from fxlib.analysis.cost.network import Network
from fxlib.analysis.cost.simulate import peak_bytes
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.model import NodeEffects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.scheduling.reordering import Pair

_NEVER = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLimits:
    """Hard limits; None means no limit. A message that alone exceeds a limit goes alone."""

    memory_bytes: int | None = None
    """Bytes of values held at once, beyond what the program holds in its original order."""
    calls_in_flight: int | None = None
    """Number of messages in flight to each destination."""
    bytes_in_flight: int | None = None
    """Bytes of arguments and results in flight to each destination."""

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return any(each is not None for each in (self.memory_bytes, self.calls_in_flight, self.bytes_in_flight))

    @property
    def of_flight(self) -> bool:
        """Whether a limit applies per destination; the runtime enforces these, too."""
        return self.calls_in_flight is not None or self.bytes_in_flight is not None


_UNLIMITED = ScheduleLimits()


class _Lane(IntEnum):
    """The kind of step that a node is for the scheduler."""

    INPUT = 0
    ISSUE = 1
    """The issue of a call that may start early."""
    NEEDED = 2
    """Work that such an issue needs, with no wait in between."""
    WORK = 3
    """Other work, and nodes that stay where the program has them: writes on servers, fences."""
    WAIT = 4
    OUTPUT = 5


_LANES = {Part.INPUT: _Lane.INPUT, Part.WAIT: _Lane.WAIT, Part.OUTPUT: _Lane.OUTPUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priorities:
    """The figures that decide which node goes first, for each node by its position in the program."""

    edges: list[list[int]]
    """Positions of the nodes that must come before."""
    seconds: list[float]
    """Seconds on the trainer's thread."""
    lanes: list[_Lane]
    tails: list[float]
    urgency: list[float]
    """Urgency of each node; `_NEVER` if the node holds nothing up."""
    critical_path_s: float

    @classmethod
    def of(cls, dependencies: Dependencies, costs: Costs) -> _Priorities:
        """Walk the program once, from its end, in time linear in nodes and edges."""
        effects = dependencies.effects
        edges = [dependencies.sources(position) for position in range(len(effects.nodes))]
        seconds = [costs.seconds[node] for node in effects.nodes]
        service = _service(dependencies, costs)
        count = len(edges)
        lanes, tails, urgency, below = [_Lane.WORK] * count, [0.0] * count, [_NEVER] * count, [0.0] * count
        for position in range(count - 1, -1, -1):
            does = effects.per_node[position]
            lane, anchor = _lane(does), does.commits or does.part is Part.FENCE
            tails[position] = tail = seconds[position] + below[position]
            if lane is _Lane.WORK and urgency[position] != _NEVER and not anchor:
                lane = _Lane.NEEDED
            lanes[position] = lane
            passed = tail if lane is _Lane.ISSUE or anchor else urgency[position] if lane is _Lane.NEEDED else _NEVER
            waits = lane is _Lane.WAIT
            for source in edges[position]:
                after = tail + service[source] if waits else tail
                below[source] = max(below[source], after)
                if passed > urgency[source] and (not anchor or effects.per_node[source].part is Part.WAIT):
                    urgency[source] = passed
        return cls(
            edges=edges,
            seconds=seconds,
            lanes=lanes,
            tails=tails,
            urgency=urgency,
            critical_path_s=max(tails, default=0.0),
        )


def _service(dependencies: Dependencies, costs: Costs) -> Sequence[float]:
    """Return, for each issue, the seconds that its calls take with nothing else in flight; 0 for other nodes."""
    service = [0.0] * len(dependencies.effects.nodes)
    for node, message in costs.messages.items():
        service[dependencies.effects.index[node]] = message.service_s
    return service


def _lane(does: NodeEffects) -> _Lane:
    if does.part is Part.ISSUE:
        return _Lane.WORK if does.commits else _Lane.ISSUE
    return _LANES.get(does.part, _Lane.WORK)


_GRAIN = 32
"""Share of the critical path below which a difference between tails does not count."""
_TRIES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An order, and the effect of the limits on it."""

    order: list[int]
    """Positions of the program's nodes, in the order in which they should run."""
    held: frozenset[int] = frozenset()
    """Positions of the issues that a limit delayed."""
    kept: bool = False
    """Whether the limits permit only the program's own order."""


def overlapped_order(dependencies: Dependencies, costs: Costs, limits: ScheduleLimits = _UNLIMITED) -> Schedule:
    """Plan the order of a program whose calls are split.

    The memory limit is met by trial: plans are made with less and less in flight until one stays within the limit, as
    the program's own order always does.
    """
    priorities = _Priorities.of(dependencies, costs)
    if limits.memory_bytes is None:
        return _planned(priorities, dependencies, costs, limits, None)
    nodes = dependencies.effects.nodes
    most = peak_bytes(nodes, costs) + limits.memory_bytes
    total = sum(each.request_bytes + each.response_bytes for each in costs.messages.values())
    held_bytes: int | None = None
    for _ in range(_TRIES):
        found = _planned(priorities, dependencies, costs, limits, held_bytes)
        if peak_bytes([nodes[position] for position in found.order], costs) <= most:
            return found
        held_bytes = (total if held_bytes is None else held_bytes) // 2
    return Schedule(order=list(range(len(nodes))), held=frozenset(_issues(priorities)), kept=True)


def closed(order: Sequence[int], pairs: Iterable[Pair], dependencies: Dependencies) -> list[int]:
    """Return the order with each issue moved right before its wait, unless something in between needs it earlier."""
    issue_of = {pair.wait: pair.issue for pair in pairs}
    issues, in_flight, needed = set(issue_of.values()), set[int](), set[int]()
    for position in order:
        in_flight.discard(issue_of.get(position, _NOWHERE))
        if in_flight:
            needed |= in_flight.intersection(dependencies.sources(position))
        if position in issues:
            in_flight.add(position)
    late = {wait: (issue, wait) for wait, issue in issue_of.items() if issue not in needed}
    moved = issues - needed
    return [each for position in order if position not in moved for each in late.get(position, (position,))]


def _planned(
    priorities: _Priorities, dependencies: Dependencies, costs: Costs, limits: ScheduleLimits, held_bytes: int | None
) -> Schedule:
    planner = _Planner(priorities, dependencies, costs, _InFlight(costs, limits, held_bytes))
    planner.run()
    if len(planner.order) < len(priorities.lanes):  # what was delayed waits for whatever waits for it
        return Schedule(order=list(range(len(priorities.lanes))), held=frozenset(_issues(priorities)), kept=True)
    return Schedule(order=planner.order, held=frozenset(planner.held_once))


def _issues(priorities: _Priorities) -> Sequence[int]:
    return [position for position, lane in enumerate(priorities.lanes) if lane is _Lane.ISSUE]


class _Planner:
    """The clock, and the heaps of ready nodes."""

    def __init__(self, priorities: _Priorities, dependencies: Dependencies, costs: Costs, in_flight: _InFlight) -> None:
        index = dependencies.effects.index
        self._lanes, self._seconds = priorities.lanes, priorities.seconds
        self._tails, self._urgency = priorities.tails, priorities.urgency
        self._in_flight = in_flight
        self._messages = {index[node]: message for node, message in costs.messages.items()}
        self._issue_of = {index[node]: index[issue_of(node)] for node in costs.results}
        self._awaited = frozenset(self._issue_of.values())
        handling_s = sum(self._seconds[position] for position in {*self._messages, *self._issue_of})
        work_s = sum(self._seconds) - handling_s
        self._left_s = max(work_s, priorities.critical_path_s - handling_s)
        self._stretch = self._left_s / work_s if work_s > 0 else 1.0
        self._grain_s = priorities.critical_path_s / _GRAIN or 1.0
        self._missing = [len(sources) for sources in priorities.edges]
        self._followers: list[list[int]] = [[] for _ in priorities.edges]
        for position, sources in enumerate(priorities.edges):
            for source in sources:
                self._followers[source].append(position)
        self._now_s = 0.0
        self._expected: dict[int, float] = {}
        self._issues: list[tuple[int, int]] = []
        self._needed: list[tuple[int, int]] = []
        self._work: list[int] = []
        self._urgent: list[tuple[float, int]] = []
        self._waits: list[tuple[float, int]] = []
        self._held: dict[str, list[tuple[int, int]]] = {}
        self.held_once: set[int] = set()
        self.order: list[int] = []

    def run(self) -> None:
        """Put all nodes in order; stop early if nothing can go on."""
        lanes = self._lanes
        for position, count in enumerate(self._missing):
            if not count and lanes[position] is not _Lane.INPUT:
                self._offer(position)
        for position, lane in enumerate(lanes):
            if lane is _Lane.INPUT:
                self._do(position)
        while (ready := self._next()) is not None:
            self._do(ready)

    def _offer(self, position: int) -> None:
        """Put a ready node on its heap."""
        lane = self._lanes[position]
        if lane is _Lane.WORK:
            heapq.heappush(self._work, position)
        elif lane is _Lane.NEEDED and self._seconds[position] == 0.0:  # a handle: whatever needs it is as good as ready
            heapq.heappush(self._issues, (_FIRST, position))
        elif lane is _Lane.NEEDED:
            heapq.heappush(self._needed, (-int(self._urgency[position] / self._grain_s), position))
        elif lane is _Lane.ISSUE:
            heapq.heappush(self._issues, (-int(self._tails[position] / self._grain_s), position))
        elif lane is _Lane.WAIT:
            heapq.heappush(
                self._waits if self._urgency[position] == _NEVER else self._urgent, (self._rank(position), position)
            )
        else:
            heapq.heappush(self._waits, (_LAST, position))

    def _next(self) -> int | None:
        while self._issues:
            entry = heapq.heappop(self._issues)
            if self._is_admitted(entry[1]):
                return entry[1]
            heapq.heappush(self._held.setdefault(self._messages[entry[1]].to, []), entry)
            self.held_once.add(entry[1])
        if self._is_due(self._urgent) and not self._is_kept_by_a_guess():
            return heapq.heappop(self._urgent)[1]
        if self._held and self._is_due(self._waits):
            return heapq.heappop(self._waits)[1]
        if self._needed:
            return heapq.heappop(self._needed)[1]
        if self._work and self._is_admitted(self._work[0]) and not self._is_worth_waiting():
            return heapq.heappop(self._work)
        return self._next_wait()

    def _next_wait(self) -> int | None:
        urgent, waits = self._urgent, self._waits
        if urgent and (self._is_guess(urgent[0][1]) or not (waits and waits[0] < urgent[0])):
            return heapq.heappop(urgent)[1]
        if waits and (waits[0][0] != _LAST or not self._held):
            return heapq.heappop(waits)[1]
        return None

    def _rank(self, wait: int) -> float:
        """Return the sort key of a wait: the time of its answer.

        Among answers without a measured time, those that hold up an issue come first, by the work left after them; the
        others come in the order in which the program needs them.
        """
        if not self._is_guess(wait):
            return self._expected_s(wait)
        if self._urgency[wait] != _NEVER:
            return -1.0 - int(self._tails[wait] / self._grain_s)
        return float(min(self._followers[wait], default=_LAST) - len(self._lanes))

    def _expected_s(self, wait: int) -> float:
        return self._expected.get(self._issue_of.get(wait, _NOWHERE), 0.0)

    def _is_due(self, waits: Sequence[tuple[float, int]]) -> bool:
        """Return whether the answer to the first of these waits is expected to have arrived."""
        return bool(waits) and waits[0][0] != _LAST and self._expected_s(waits[0][1]) <= self._now_s

    def _is_guess(self, wait: int) -> bool:
        """Return whether the time of the answer to a wait was never measured."""
        message = self._messages.get(self._issue_of.get(wait, _NOWHERE))
        return message is not None and message.guessed

    def _is_kept_by_a_guess(self) -> bool:
        """Return whether a call that needs no answer would be issued only after an answer whose time is unknown."""
        return bool(self._needed) and self._is_guess(self._urgent[0][1])

    def _is_admitted(self, position: int) -> bool:
        message = self._messages.get(position)
        return message is None or self._in_flight.admits(message)

    def _is_worth_waiting(self) -> bool:
        """Return whether to stand still for the next answer that holds something up, instead of working meanwhile."""
        if not self._urgent:
            return False
        wait = self._urgent[0][1]
        expected = self._expected_s(wait)
        worked_s = self._now_s + self._seconds[self._work[0]] * self._stretch
        if expected >= worked_s:
            return False
        tail_s = self._tails[wait]
        return expected + max(tail_s, self._left_s) <= max(worked_s + tail_s, self._now_s + self._left_s)

    def _do(self, position: int) -> None:
        self.order.append(position)
        seconds = self._seconds[position]
        if position in self._messages:
            self._now_s += seconds
            awaited = position in self._awaited
            message = self._messages[position]
            self._expected[position] = self._in_flight.send(position, message, self._now_s, awaited=awaited)
            self._retry()
        if position in self._issue_of:
            issue = self._issue_of[position]
            self._now_s = max(self._now_s, self._expected[issue]) + seconds
            self._in_flight.remove(issue)
            self._retry()
        elif position not in self._messages:
            self._now_s += seconds * self._stretch
            self._left_s -= seconds * self._stretch
        missing = self._missing
        for follower in self._followers[position]:
            missing[follower] -= 1
            if not missing[follower]:
                self._offer(follower)

    def _retry(self) -> None:
        """Offer the first delayed issue of each destination again."""
        for to in list(self._held):
            heapq.heappush(self._issues, heapq.heappop(self._held[to]))
            if not self._held[to]:
                del self._held[to]


_NOWHERE = -1
_LAST = float("inf")
_FIRST = -sys.maxsize


@dataclass(slots=True)
class _Load:
    """The load in flight to one destination, or to all of them."""

    calls: int = 0
    size: int = 0


class _InFlight:
    """Messages between their issues and their waits."""

    def __init__(self, costs: Costs, limits: ScheduleLimits, held_bytes: int | None) -> None:
        """Begin with nothing in flight; results in flight may take `held_bytes` together, if that is given."""
        self._network = Network(costs.servers)
        self._limits = limits
        self._held_bytes = held_bytes
        self._all = _Load()
        self._loads: dict[str, _Load] = {}
        self._expected: dict[int, tuple[MessageCost, float]] = {}

    def admits(self, message: MessageCost) -> bool:
        """Return whether the limits let a message go now. A message that alone exceeds a limit goes alone."""
        load, limits = self._loads.get(message.to), self._limits
        if self._held_bytes is not None and self._all.calls and self._all.size + _size(message) > self._held_bytes:
            return False
        if load is None or not load.calls:
            return True
        if limits.calls_in_flight is not None and load.calls >= limits.calls_in_flight:
            return False
        return limits.bytes_in_flight is None or load.size + _size(message) <= limits.bytes_in_flight

    def send(self, position: int, message: MessageCost, now_s: float, *, awaited: bool) -> float:
        """Send a message and return when its answer is expected; only what is waited for counts against the limits."""
        expected = self._network.send(message, now_s).expected_s
        if not awaited:
            return expected
        self._expected[position] = message, expected
        for load in (self._all, self._loads.setdefault(message.to, _Load())):
            load.calls += 1
            load.size += _size(message)
        return expected

    def remove(self, position: int) -> None:
        """Remove a message that was waited for; further waits for it change nothing."""
        found = self._expected.pop(position, None)
        if found is None:
            return
        for load in (self._all, self._loads[found[0].to]):
            load.calls -= 1
            load.size -= _size(found[0])


def _size(message: MessageCost) -> int:
    return message.request_bytes + message.response_bytes
