"""One step of a trainer as the cost model sees it: its thread, node by node, and its calls on their way.

The thread issues, works and waits in the order of the graph; `cost.network` says when answers come. After the
forward come loss, backward and the rest of the step, and then the gradients of remote results go home: one by one, or
in one message to each server, all servers side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from torch.fx import GraphModule, Node

from fxlib.analysis.cost.costs import Costs, issue_of
from fxlib.analysis.cost.gradient_messages import (
    Gradient,
    gradients,
    grouped_in_messages,
    issue_s,
    service_s,
    transfer_s,
)
from fxlib.analysis.cost.memory import peak_bytes
from fxlib.analysis.cost.network import Network, Trip
from fxlib.spec.profile import Profile
from fxlib.spec.report import Span, Timeline

STOLEN_SHARE = 0.35
"""Share of the RPC layer's work on a message that the trainer's thread loses where it works meanwhile.

It holds the interpreter's lock for a part of it, and takes a core. Measured on two cores: eight to 26 calls in flight
while layers 1024 units wide run, against the same layers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCall:
    """One call of a simulated step, seconds from the step's start. Calls of one batch share all but their waits."""

    call: str
    to: str
    issue_from_s: float
    issued_s: float
    sent_s: float
    started_s: float
    """When a worker of the server took it up."""
    served_s: float
    arrived_s: float
    wait_from_s: float
    wait_until_s: float
    blocking: bool = False

    @property
    def exposed_s(self) -> float:
        """How long the trainer's thread stands still in the call; all of it where it is a blocking one."""
        return self.wait_until_s - (self.issue_from_s if self.blocking else self.wait_from_s)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One simulated step."""

    step_s: float
    calls: tuple[SimulatedCall, ...]
    peak_bytes: int
    """The most that the forward's values hold at once: `fxlib.analysis.cost.memory`."""
    timeline: Timeline

    @property
    def by_call(self) -> dict[str, SimulatedCall]:
        """Calls by their name as captured."""
        return {each.call: each for each in self.calls}


def predict(module: GraphModule, profile: Profile | None) -> Simulation:
    """Simulate one step of a captured or rewritten module, by what the program was measured to take."""
    return simulate(list(module.graph.nodes), Costs.of(module, profile))


def simulate(order: Sequence[Node], costs: Costs) -> Simulation:
    """Simulate one step in which the forward runs its nodes in `order`, in time linear but for the servers' queues."""
    step = _Step(costs)
    step.forward(order)
    step.backward(order)
    spans = tuple(sorted(step.spans, key=lambda span: span.start_s))
    timeline = Timeline(spans=spans, step_s=step.now_s)
    return Simulation(
        step_s=step.now_s, calls=tuple(step.calls), peak_bytes=peak_bytes(order, costs), timeline=timeline
    )


class _Step:
    """The trainer's clock, and what has happened so far."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._network = Network(costs.servers)
        self._trips: dict[Node, tuple[Trip, float]] = {}
        self.now_s = 0.0
        self.calls: list[SimulatedCall] = []
        self.spans: list[Span] = []

    def forward(self, order: Sequence[Node]) -> None:
        seconds, messages, results = self._costs.seconds, self._costs.messages, self._costs.results
        for node in order:
            if node in messages:
                self._issue(node)
            elif node in results:
                self._wait(node, issue_of(node))
            else:
                self.now_s += seconds[node]
        self._steal()
        self._span("forward", 0.0)

    def backward(self, order: Sequence[Node]) -> None:
        """Run the rest of the step."""
        self._phase("loss", self._costs.loss_s)
        self._phase("backward", self._costs.backward_s)
        self._phase("optimizer", self._costs.rest_s)
        for travels, group in groupby(gradients(order, self._costs), key=attrgetter("travels")):
            if travels:
                self._push_side_by_side(list(group))
                continue
            for call, push in ((each.call, each.push) for each in group):
                start = self.now_s
                self.now_s += push.issue_s + push.service_s.median + call.wake_s + call.wait_s
                self.spans.append(Span(kind="push", name=call.call, to=call.to, start_s=start, end_s=self.now_s))

    def _issue(self, node: Node) -> None:
        self._steal()
        message, start = self._costs.messages[node], self.now_s
        self.now_s += message.issue_s
        trip = self._network.send(message, self.now_s)
        if node in self._costs.results:
            self._block(node, trip, start, blocking=True)
        else:
            self._trips[node] = trip, start
            self.spans.append(Span(kind="issue", name=_name(trip), to=message.to, start_s=start, end_s=self.now_s))

    def _wait(self, node: Node, issue: Node) -> None:
        trip, start = self._trips[issue]
        self._block(node, trip, start, blocking=False)

    def _block(self, node: Node, trip: Trip, issue_from_s: float, *, blocking: bool) -> None:
        self._steal()
        call, start = self._costs.results[node], self.now_s
        arrived = self._network.arrival_s(trip)
        self.now_s = max(start, arrived) + (call.wake_s if arrived > start else 0.0) + call.wait_s
        self.calls.append(
            SimulatedCall(
                call=call.call,
                to=call.to,
                issue_from_s=issue_from_s,
                issued_s=trip.issued_s,
                sent_s=trip.sent_s,
                started_s=trip.started_s,
                served_s=trip.served_s,
                arrived_s=arrived,
                wait_from_s=start,
                wait_until_s=self.now_s,
                blocking=blocking,
            )
        )
        if blocking:
            self.spans.append(Span(kind="call", name=call.call, to=call.to, start_s=issue_from_s, end_s=self.now_s))
            return
        self.spans.append(Span(kind="wait", name=call.call, to=call.to, start_s=start, end_s=self.now_s))
        self.spans.append(
            Span(kind="in_flight", name=call.call, to=call.to, start_s=issue_from_s, end_s=min(arrived, self.now_s))
        )

    def _steal(self) -> None:
        """Give answers that came while the thread worked their share of its time."""
        for trip in self._network.answered_by(self.now_s):
            self.now_s += STOLEN_SHARE * trip.message.intake_s

    def _push_side_by_side(self, group: Sequence[Gradient]) -> None:
        """Send each server its messages, one when the one before has been answered, as `gradients.pushes` does."""
        start, servers = self.now_s, self._costs.servers
        by_server: dict[str, list[Gradient]] = {}
        for each in group:
            by_server.setdefault(each.call.to, []).append(each)
        to_come = {to: deque(grouped_in_messages(each)) for to, each in by_server.items()}
        in_flight: deque[tuple[str, float]] = deque()
        link_free_s = 0.0
        fastest = max(servers[to].bytes_per_s for to in by_server)

        def send(to: str) -> None:
            nonlocal link_free_s
            message, server = to_come[to].popleft(), servers[to]
            self.now_s += issue_s(message)
            carried_s = transfer_s(message, server)
            link_free_s = max(self.now_s, link_free_s) + carried_s * server.bytes_per_s / fastest
            arrives_s = max(self.now_s, link_free_s - carried_s) + service_s(message, server)
            in_flight.append((to, arrives_s))
            self.spans.extend(
                Span(kind="in_flight", name=each.call.call, to=to, start_s=self.now_s, end_s=arrives_s)
                for each in message
            )

        for to in to_come:
            send(to)
        while in_flight:
            to, arrives_s = in_flight.popleft()
            call = by_server[to][0].call
            self.now_s = max(self.now_s, arrives_s + call.wake_s) + call.wait_s
            if to_come[to]:
                send(to)
        self._span("push", start)

    def _phase(self, kind: str, seconds: float) -> None:
        start = self.now_s
        self.now_s += seconds
        if seconds:
            self._span(kind, start)

    def _span(self, kind: str, start_s: float) -> None:
        self.spans.append(Span(kind=kind, name="", to="", start_s=start_s, end_s=self.now_s))


def _name(trip: Trip) -> str:
    return trip.message.calls[0].call
