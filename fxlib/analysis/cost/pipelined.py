"""The steady step of a loop under `fxlib.pipeline`, according to the cost model.

The thread's clock, the servers and the links continue from step to step. A step begins with the reads of the batch that
was pulled last, as far as these need not wait for a push; the others, and the rows read by keys that pushes change,
travel behind the step's pushes. The loop itself measures which way is fastest, so the prediction is for the fastest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.cost.costs import CallCost, Costs, Loop, MessageCost, behind, is_serial, message_of
from fxlib.analysis.cost.network import Trip
from fxlib.analysis.cost.simulate import Gradient, SimulatedStep, predict
from fxlib.analysis.effects.prologue import CallAhead, Way, ways
from fxlib.spec.profile import Profile
from fxlib.spec.report import Timeline

_MESSAGE_S = 4e-5
"""Seconds of the trainer's thread for each message that runs ahead, besides its issue: its arguments are computed
twice, and its tensors inspected."""
_CALL_S = 4e-6
"""Seconds for each call in such a message."""
_KEYS_S = 1.5e-5
"""Seconds for each call whose keys are compared with those that a push changes."""
_WARMUPS = 4
"""Number of periods after which steps are taken to be alike. A period is a step for each batch that is on the way at
once: where reads take several steps, one of these steps waits for them, and the others do not."""
_MEASURED = 2
"""Number of periods over which a steady step is measured, after those."""
_MOST_DEPTH = 8
"""Depth beyond which a deeper pipeline is assumed to change nothing."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The steady step of a loop.

    Attributes:
        step_s: seconds of one step.
        by_way: seconds of one step for each way in which reads run ahead; under None, each forward makes its own reads.
        timeline: two consecutive steps of the fastest way.
    """

    step_s: float
    by_way: Mapping[Way | None, float]
    timeline: Timeline


def predict_pipelined(module: GraphModule, profile: Profile | None, loop: Loop) -> Prediction:
    """Simulate a loop over a captured or rewritten module, by the profile of the program."""
    costs, order = Costs.of(module, profile), list(module.graph.nodes)
    ahead = loop.reads(module)
    within = predict(module, profile)
    found: dict[Way | None, tuple[float, Timeline]] = {None: (within.step_s, within.timeline)}
    for way in ways({each.way for each in ahead.values() if each.way is not None}) if ahead else ():
        found[way] = _SimulatedSteps(order, costs, ahead, loop, way).steady()
    by_way = {way: step_s for way, (step_s, _) in found.items()}
    fastest = min(by_way, key=by_way.__getitem__)
    return Prediction(step_s=by_way[fastest], by_way=by_way, timeline=found[fastest][1])


class _Read:
    """One message of reads for a later step.

    Attributes:
        trips: the messages sent for it, in order; empty while it is to travel behind a push.
    """

    def __init__(self, node: Node, message: MessageCost) -> None:
        self.node = node
        self.message = message
        self.trips: list[Trip] = []


class _SimulatedSteps(SimulatedStep):
    """The trainer's clock over the steps of a loop."""

    def __init__(
        self,
        order: Sequence[Node],
        costs: Costs,
        ahead: Mapping[Node, CallAhead],
        loop: Loop,
        way: Way,
    ) -> None:
        super().__init__(costs)
        self._order, self._ahead, self._way = order, ahead, way
        self._depth, self._loop = min(loop.depth, _MOST_DEPTH), loop
        self._to_come: deque[list[_Read]] = deque()
        """The reads for each of the next steps."""
        self._taken: dict[Node, _Read] = {}
        """The reads for this step."""
        self._behind: dict[str, list[tuple[_Read, MessageCost]]] = {}
        """The reads still to be made behind this step's pushes, by server."""
        self._riding: list[MessageCost] = []
        """The calls that travel in the message that is sent next."""

    def steady(self) -> tuple[float, Timeline]:
        """Return the seconds of a steady step, and a timeline of two consecutive ones."""
        ends_s, measured = [0.0], _MEASURED * (self._depth + 1)
        for _ in range(_WARMUPS * (self._depth + 1) + measured):
            self._run_step()
            ends_s.append(self.now_s)
        timeline = Timeline(spans=tuple(self.spans), step_s=self.now_s).between(ends_s[-3], ends_s[-1], steps=2)
        return (ends_s[-1] - ends_s[-1 - measured]) / measured, timeline

    def _run_step(self) -> None:
        reads = self._to_come.popleft() if self._to_come else []
        self._taken = {each.node: each for each in reads}
        while len(self._to_come) < self._depth:
            self._to_come.append([self._fetch(node, call) for node, call in self._ahead.items()])
        self.forward(self._order)
        self._behind = self._to_be_read_behind()
        self.backward(self._order)
        for read, message in (each for found in self._behind.values() for each in found):
            read.trips.append(self._send(message))

    def _fetch(self, node: Node, call: CallAhead) -> _Read:
        """Make a read for a later step, or prepare it."""
        message, seconds = self._costs.messages[node], self._costs.seconds
        read = _Read(node, message)
        self.now_s += _MESSAGE_S + _CALL_S * len(message.calls) + sum(seconds[each] for each in call.prologue)
        if call.way is Way.NOTHING_WRITTEN or call.way is self._way is Way.BY_KEYS:
            read.trips.append(self._send(message))
        return read

    @override
    def _issue(self, node: Node) -> None:
        read = self._taken.get(node)
        if read is None:
            super()._issue(node)
            return
        *others, last = read.trips
        if node in self._costs.results:
            self._arrived(others)
            self._block(node, last, self.now_s, blocking=True)
        else:
            self._trips[node] = last, read.trips[0].issued_s

    @override
    def _wait(self, node: Node, issue: Node) -> None:
        if issue in self._taken:
            self._arrived(self._taken[issue].trips[:-1])
        super()._wait(node, issue)

    def _arrived(self, trips: Iterable[Trip]) -> None:
        for each in trips:
            self.now_s = max(self.now_s, self._network.arrival_s(each))

    def _to_be_read_behind(self) -> dict[str, list[tuple[_Read, MessageCost]]]:
        """Return the next step's reads that are made behind this step's pushes, by server."""
        found: dict[str, list[tuple[_Read, MessageCost]]] = {}
        for read in self._to_come[0]:
            call, message = self._ahead[read.node], read.message
            if call.way is Way.NOTHING_WRITTEN:
                continue
            if read.trips:
                self.now_s += _KEYS_S * len(message.calls)
                if not all(each is not None and each.concurrent for each in call.contracts):
                    self._arrived(read.trips)
                shares = ((each, self._loop.changed(each.call, each.contract)) for each in message.calls)
                changed = tuple(_part_of(each, share) for each, share in shares if share)
                if not changed:
                    continue
                message = message_of(changed, self._costs.servers[message.to], serial=is_serial(read.node))
            found.setdefault(message.to, []).append((read, message))
        return found

    @override
    def _send_pushes(self, group: Sequence[Gradient], *, is_last: bool) -> Trip:
        if not (is_last and all(each.batchable for each in group)):
            return super()._send_pushes(group, is_last=is_last)
        riders = self._behind.pop(group[0].call.to, [])
        self._riding = [message for _, message in riders]
        trip = super()._send_pushes(group, is_last=is_last)
        for read, _ in riders:
            read.trips.append(trip)
        return trip

    @override
    def _send(self, message: MessageCost) -> Trip:
        riding, self._riding = self._riding, []
        return super()._send(reduce(behind, riding, message))


def _part_of(call: CallCost, share: float) -> CallCost:
    """Return the cost of reading a share of a call's rows; a server may charge per call, so all of its work counts."""
    return replace(
        call, request_bytes=round(share * call.request_bytes), response_bytes=round(share * call.response_bytes)
    )
