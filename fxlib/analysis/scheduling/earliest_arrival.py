"""The earliest that calls could be issued and answered, with unlimited time on the trainer: what a batch may delay."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from fxlib.analysis.cost.costs import CallCost, Costs, Message, message_of
from fxlib.analysis.cost.network import Network, Trip
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.node_kinds import Part
from fxlib.spec.profile import ServerProfile

NOISE = 0.25
"""Share of a service time by which repeated measurements differ."""
UNSURE = 0.25
"""Share of what a message saves: local work that is taken to be longer may be much longer where costs are guesses."""
_NODE_S = 1e-6
"""Seconds that the interpreter takes for any node, which bound how far a consumer is followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One call: when it may be issued, in seconds from the start of the step, and how long its answer takes."""

    place: int
    """Place of its issue in the program."""
    ready_s: float
    service_s: float
    tolerance_s: float
    """Seconds by which it may be issued, or answered, later for the sake of a shared message."""

    @property
    def lands_s(self) -> float:
        """When the answer is there, the call issued as soon as it is ready."""
        return self.ready_s + self.service_s


class Arrivals:
    """The arrivals of the calls of one program, and what the trainer could do with them."""

    def __init__(self, dependencies: Dependencies, costs: Costs, calls: Mapping[Node, CallCost]) -> None:
        """Find the longest path to each node, in linear time.

        Args:
            dependencies: of the program.
            costs: of the program.
            calls: by their issues; of other calls, what they took is taken from the costs.
        """
        effects = dependencies.effects
        self._nodes, self._index, self._per_node = effects.nodes, effects.index, effects.per_node
        self._costs, self._calls = costs, calls
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._busy_s = 0.0
        """Work on the trainer that needs no answer: for as long, nobody misses one."""
        needs_answer: list[bool] = []
        for place, node in enumerate(effects.nodes):
            begins, after_answer = 0.0, effects.per_node[place].part in _ANSWERS
            for source in dependencies.sources(place):
                begins = max(begins, self._ends[source])
                after_answer = after_answer or needs_answer[source]
            needs_answer.append(after_answer)
            lasts = costs.seconds.get(node, 0.0)
            if not after_answer and effects.per_node[place].part is Part.LOCAL:
                self._busy_s += lasts
            self._starts.append(begins)
            self._ends.append(begins + lasts + self._answer_s(node))

    def of(self, place: int) -> Arrival:
        """Return the arrival of the call that is issued at `place`."""
        call = self._calls[self._nodes[place]]
        tolerance_s = max(saved_s(call), NOISE * call.service_s)
        return Arrival(place=place, ready_s=self._ends[place], service_s=call.service_s, tolerance_s=tolerance_s)

    def idles(self, calls: Sequence[Arrival]) -> bool:
        """Whether the trainer would miss the first answers if all came together, for longer than is tolerated.

        It would if it had run out of other work by then, and if the first answers alone let it go on: with work, or
        with further calls. Work that also needs one of the last answers does not count: it starts late anyway.

        Args:
            calls: at least one, each waited for once.
        """
        tolerance_s = min(call.tolerance_s for call in calls)
        soon_s = max(call.ready_s for call in calls) + max(call.service_s for call in calls) - tolerance_s
        if max(min(call.lands_s for call in calls), self._busy_s) >= soon_s:
            return False
        waiting = [wait for call in calls for wait in self._nodes[call.place].users]
        seen, found_s = set(waiting), 0.0
        while waiting:
            for user in waiting.pop().users:
                place = self._index[user]
                if user in seen or self._starts[place] >= soon_s:
                    continue
                seen.add(user)
                waiting.append(user)
                found_s += self._worth_s(user)
                if found_s > tolerance_s:
                    return True
        return False

    def needs_some(self, group: Sequence[int]) -> bool:
        """Whether calls, or work worth speaking of, need some answers of a group and not all.

        In one message they would have to wait for the last of the answers, whichever that is. Work is worth speaking of
        from a fraction of what the message saves, since its costs may be guesses, too.

        Args:
            group: places of issues, each waited for once.
        """
        every, issues = (1 << len(group)) - 1, [self._nodes[place] for place in group]
        needs = {self._index[wait]: 1 << number for number, issue in enumerate(issues) for wait in issue.users}
        left_s = UNSURE * sum(saved_s(self._calls[issue]) for issue in issues[1:])
        waits, ahead = frozenset(needs), sorted(needs)
        while ahead:
            place = heapq.heappop(ahead)
            if needs[place] == every or self._per_node[place].commits:  # writes come after all earlier answers anyway
                continue
            node = self._nodes[place]
            left_s -= 0.0 if place in waits else self._worth_s(node)
            if left_s < 0:
                return True
            for user in map(self._index.__getitem__, node.users):
                if user not in needs:
                    heapq.heappush(ahead, user)
                needs[user] = needs.get(user, 0) | needs[place]
        return False

    def _worth_s(self, node: Node) -> float:
        """Return how long a node, and the call that it issues, would take."""
        message = self._costs.messages.get(node)
        return max(self._costs.seconds.get(node, 0.0), _NODE_S) + (0.0 if message is None else message.service_s)

    def _answer_s(self, node: Node) -> float:
        """Return how long a wait, or a blocking call, is for its answer."""
        if node not in self._costs.results:
            return 0.0
        sender = node.args[0] if node not in self._costs.messages else node
        known = self._calls.get(sender) if isinstance(sender, Node) else None
        return (known or self._costs.results[node]).service_s


_ANSWERS = frozenset({Part.CALL, Part.WAIT})


def saved_s(call: CallCost) -> float:
    """Return what a call costs the trainer's thread if it travels alone."""
    return call.issue_s + call.wait_s


def slower_together(calls: Sequence[CallCost], server: ServerProfile, *, in_turn: bool) -> bool:
    """Whether calls are over clearly later as one batch than issued singly, one after another.

    Both ways go through the model of the network, with nothing else in flight. One message is less work for all
    processes, so where the two are as good as each other, up to the noise of what was measured, calls travel together.

    Args:
        calls: to one server.
        server: its profile.
        in_turn: whether the batch works its calls off one after another. Else they run side by side.
    """
    apart_s = _over_s([message_of((call,), server, serial=False) for call in calls], server)
    return together_s(calls, server, in_turn=in_turn) > (1.0 + NOISE) * apart_s


def together_s(calls: Sequence[CallCost], server: ServerProfile, *, in_turn: bool) -> float:
    """Return when calls are over that are issued now, as one batch, with nothing else in flight."""
    return _over_s([message_of(tuple(calls), server, serial=in_turn)], server)


def _over_s(messages: Sequence[Message], server: ServerProfile) -> float:
    network, now_s, trips = Network({message.to: server for message in messages}), 0.0, list[Trip]()
    for message in messages:
        now_s += message.issue_s
        trips.append(network.send(message, now_s))
    for trip in trips:
        now_s = max(now_s, network.arrival_s(trip)) + trip.message.calls[0].wait_s
    return now_s
