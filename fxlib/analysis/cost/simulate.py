"""One step of a trainer according to the cost model: its thread, node by node, its calls in flight, and its memory.

The thread issues, works and waits in the order of the graph; `cost.network` says when answers come. After the forward
come loss, backward and the rest of the step. Then the gradients of remote results are pushed, to all servers in
parallel, as `gradients.pushes` sends them: one by one, or in messages that consecutive pushes to one server share if
their contracts let them be batched. In such a message, pushes to different parts of the server's state run in parallel,
those to one part in order, and all of them in order if some push may touch any part.

A value is held from the first node that needs it to the last, as in the code that `torch.fx` generates: `live_bytes`
adds this up, whatever the values are and wherever their sizes come from. Memory that autograd keeps for backward is the
same in every order once the forward is over, and memory that an operator needs only while it runs is no node's value:
both are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from torch.fx import GraphModule, Node

from fxlib.analysis.cost.costs import CallCost, Costs, MessageCost, issue_of, message_of
from fxlib.analysis.cost.network import Network, Trip
from fxlib.analysis.effects.resources import declared_contract
from fxlib.runtime import ops
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.spec.contract import Contract
from fxlib.spec.profile import Profile, Push
from fxlib.spec.report import Span, Timeline

STOLEN_SHARE = 0.35
"""Share of the RPC layer's work on a message that the trainer's thread loses if it works meanwhile.

The RPC layer holds the interpreter's lock for a part of that time, and takes a core. Measured on two cores: eight to 26
calls in flight while layers 1024 units wide run, against the same layers alone.
"""

_Value = TypeVar("_Value", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCall:
    """One call of a simulated step, in seconds from the step's start. Calls of one batch share all but their waits."""

    call: str
    to: str
    issue_from_s: float
    issued_s: float
    sent_s: float
    started_s: float
    """Start of the work on the call by a worker of the server, in seconds."""
    served_s: float
    arrived_s: float
    wait_from_s: float
    wait_until_s: float
    blocking: bool = False

    @property
    def exposed_s(self) -> float:
        """Seconds that the trainer's thread stands still in the call; all of its time if it is a blocking call."""
        return self.wait_until_s - (self.issue_from_s if self.blocking else self.wait_from_s)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One simulated step."""

    step_s: float
    calls: tuple[SimulatedCall, ...]
    peak_bytes: int
    """The most that the forward's values hold at once, in bytes."""
    timeline: Timeline
    cores_s: float = 0.0
    """See `fxlib.spec.profile.Profile`."""

    @property
    def shared_s(self) -> float:
        """How long the step takes where launchers and servers share the profiled host's cores, as they did there.

        `step_s` is that of servers with hosts of their own.
        """
        return max(self.step_s, self.cores_s)

    @property
    def by_call(self) -> dict[str, SimulatedCall]:
        """Calls by their name as captured."""
        return {each.call: each for each in self.calls}


def predict(module: GraphModule, profile: Profile | None) -> Simulation:
    """Simulate one step of a captured or rewritten module, by the profile of the program."""
    return simulate(list(module.graph.nodes), Costs.of(module, profile))


def simulate(order: Sequence[Node], costs: Costs) -> Simulation:
    """Simulate a step whose forward runs its nodes in `order`, in time linear but for the servers' queues."""
    step = SimulatedStep(costs)
    step.forward(order)
    step.backward(order)
    spans = tuple(sorted(step.spans, key=lambda span: span.start_s))
    timeline = Timeline(spans=spans, step_s=step.now_s)
    return Simulation(
        step_s=step.now_s,
        calls=tuple(step.calls),
        peak_bytes=peak_bytes(order, costs),
        timeline=timeline,
        cores_s=costs.cores_s,
    )


class SimulatedStep:
    """The trainer's clock, and what has happened so far."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._network = Network(costs.servers)
        self._trips: dict[Node, tuple[Trip, float]] = {}
        self.now_s = 0.0
        self.calls: list[SimulatedCall] = []
        self.spans: list[Span] = []

    def forward(self, order: Sequence[Node]) -> None:
        """Run the forward."""
        start_s = self.now_s
        seconds, messages, results = self._costs.seconds, self._costs.messages, self._costs.results
        for node in order:
            if node in messages:
                self._issue(node)
            elif node in results:
                self._wait(node, issue_of(node))
            else:
                self.now_s += seconds[node]
        self._steal()
        self._span("forward", start_s)

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
        trip = self._send(message)
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
        """Send each server its messages, each after the previous one's answer, as `gradients.pushes` does."""
        start = self.now_s
        by_server: dict[str, list[Gradient]] = {}
        for each in group:
            by_server.setdefault(each.call.to, []).append(each)
        to_come = {to: deque(_grouped_in_messages(each)) for to, each in by_server.items()}
        in_flight: deque[tuple[Trip, Sequence[Gradient]]] = deque()

        def send(to: str) -> None:
            gradients = to_come[to].popleft()
            in_flight.append((self._send_pushes(gradients, is_last=not to_come[to]), gradients))

        for to in to_come:
            send(to)
        while in_flight:
            trip, gradients = in_flight.popleft()
            to, call, arrived_s = trip.message.to, gradients[0].call, self._network.arrival_s(trip)
            self.now_s = max(self.now_s, arrived_s + call.wake_s) + call.wait_s
            self.spans.extend(
                Span(kind="in_flight", name=each.call.call, to=to, start_s=trip.issued_s, end_s=arrived_s)
                for each in gradients
            )
            if to_come[to]:
                send(to)
        self._span("push", start)

    def _send_pushes(self, group: Sequence[Gradient], *, is_last: bool) -> Trip:
        """Send gradients to one server in one message; `is_last` says whether it is the step's last to that server."""
        chains: dict[Hashable, list[CallCost]] = {}
        in_order = any(each.part is None for each in group)
        for each in group:
            chains.setdefault(None if in_order else each.part, []).append(each.cost)
        costs, server = tuple(each.cost for each in group), self._costs.servers[group[0].call.to]
        return self._send(message_of(costs, server, serial=False, chains=list(chains.values())))

    def _send(self, message: MessageCost) -> Trip:
        self._steal()
        self.now_s += message.issue_s
        return self._network.send(message, self.now_s)

    def _phase(self, kind: str, seconds: float) -> None:
        start = self.now_s
        self.now_s += seconds
        self._steal()
        if seconds:
            self._span(kind, start)

    def _span(self, kind: str, start_s: float) -> None:
        self.spans.append(Span(kind=kind, name="", to="", start_s=start_s, end_s=self.now_s))


def _name(trip: Trip) -> str:
    return trip.message.calls[0].call


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one remote result."""

    call: CallCost
    """The call whose result has the gradient."""
    push: Push
    contract: Contract | None
    """Contract of the function that takes the gradient."""
    part: Hashable
    """The part of its server's state that the push touches; None if it may touch all of it."""
    travels: bool
    """Whether the push may be in flight while others are."""

    @property
    def batchable(self) -> bool:
        """Whether the push may share a message with others."""
        return self.contract is not None and self.contract.batchable

    @property
    def cost(self) -> CallCost:
        """The cost of the push as a call by itself."""
        push = self.push
        return replace(
            self.call,
            function=push.function,
            issue_s=push.issue_s,
            service_s=push.service_s.median,
            request_bytes=push.request_bytes,
            response_bytes=0,
            contract=self.contract,
        )


def gradients(order: Iterable[Node], costs: Costs) -> list[Gradient]:
    """Return the gradients that are pushed, in program order."""
    found: list[tuple[object, Gradient]] = []
    for node in order:
        if node.target in TRACKERS and (call := _result_in(node, costs)) is not None and call.push is not None:
            contract = declared_contract(call.push.function)
            gradient = Gradient(
                call=call,
                push=call.push,
                contract=contract,
                part=_part(node, contract),
                travels=contract is not None and node.target is ops.send_gradient,
            )
            found.append((node.args[-1], gradient))
    return [gradient for _, gradient in sorted(found, key=_position)]


def _grouped_in_messages(group: Iterable[Gradient]) -> list[list[Gradient]]:
    """Put consecutive gradients that travel in one message into one list each; all are for one server."""
    messages: list[list[Gradient]] = []
    is_open = False
    for gradient in group:
        if gradient.batchable and is_open:
            messages[-1].append(gradient)
        else:
            messages.append([gradient])
        is_open = gradient.batchable
    return messages


def _position(found: tuple[object, Gradient]) -> int:
    return found[0] if isinstance(found[0], int) else 0


def _result_in(node: Node, costs: Costs) -> CallCost | None:
    return next((costs.results[each] for each in node.all_input_nodes[:1] if each in costs.results), None)


def _part(node: Node, contract: Contract | None) -> Hashable:
    """Return the names of the state that a push touches, and the value that says which part of it."""
    args, kwargs = node.args[3], node.args[4]
    if contract is None or not isinstance(args, Sequence) or not isinstance(kwargs, dict):
        return None
    given = contract.part_of(args, kwargs)
    return None if given is None else (contract.reads | contract.writes, given)


def live_bytes(
    order: Sequence[Node], needed: Callable[[Node], Iterable[_Value]], size: Callable[[_Value], int]
) -> Iterator[int]:
    """Yield how much is held while each node of an order runs, in linear time.

    Args:
        order: the nodes.
        needed: the values that have to be there while a node runs, its own among them.
        size: the bytes of a value.
    """
    begun, ended = [0] * len(order), [0] * len(order)
    last: dict[_Value, int] = {}
    for position, node in enumerate(order):
        for value in needed(node):
            if value not in last:
                begun[position] += size(value)
            last[value] = position
    for value, position in last.items():
        ended[position] += size(value)
    held = 0
    for begins, ends in zip(begun, ended, strict=True):
        held += begins
        yield held
        held -= ends


def peak_bytes(order: Sequence[Node], costs: Costs) -> int:
    """Return the most bytes held at once, by the sizes in the costs.

    A result counts from the issue of its call, since its answer may come at any time, and the arguments until the wait.
    """
    messages, sizes = costs.messages, costs.value_bytes
    waits = {node: [each for each in node.users if each in costs.results] for node in messages.keys() - costs.results}
    roots: dict[Node, Node] = {}
    for node in order:
        inputs = node.all_input_nodes
        roots[node] = roots[inputs[0]] if node in costs.views and inputs else node

    def needed(node: Node) -> Iterator[Node]:
        yield roots[node]
        yield from waits.get(node, ())
        for value in node.all_input_nodes:
            yield roots[value]
            if value in messages:
                yield from (roots[each] for each in value.all_input_nodes)

    def size(value: Node) -> int:
        if value not in waits:
            return sizes[value]
        return messages[value].response_bytes - sum(sizes[wait] for wait in waits[value])  # not taken by any wait

    return max(live_bytes(order, needed, size), default=0)
