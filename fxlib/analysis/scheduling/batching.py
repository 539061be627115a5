"""Decides which calls of a program may travel in one message, and which of them should.

Calls count with the usual service time of their kind, so that a plan does not follow one noisy measurement. What a
batch may delay follows from the earliest times at which its calls could be issued and answered, with unlimited time on
the trainer.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from torch.fx import Node

from fxlib.analysis.cost.costs import CallCost, Costs, MessageCost, message_of, transfer_s
from fxlib.analysis.cost.network import Network, Trip
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import contract_of_call, function_name
from fxlib.analysis.scheduling.reordering import levels
from fxlib.reasons import Declined, Reason
from fxlib.runtime import functions, ops
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.profile import ServerProfile

_NOISE = 0.25
"""Share of a service time by which repeated measurements differ."""
_UNSURE = 0.25
"""Share of what a message saves that counts as worth a wait: where costs are guesses, local work may take much
longer."""
_NODE_S = 1e-6
"""Seconds that the interpreter takes for any node; they bound how far a consumer is followed."""

_ANSWERS = frozenset({Part.CALL, Part.WAIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How much one message may carry: calls, and bytes of requests and answers, as far as a profile has them."""

    calls: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Groups of issues that are each merged into one, by position, in program order; and an order that allows it."""

    groups: tuple[tuple[int, ...], ...]
    batched_by: tuple[str | None, ...]
    """The declared form that serves each group; None: its calls run one by one on the server."""
    order: tuple[int, ...]
    """All positions in their new order; the members of a group are adjacent."""
    dependencies: Dependencies
    """Dependencies of the unchanged program."""
    declined: tuple[Declined, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The key that the calls of one message share."""

    to: Hashable
    timeout: Hashable
    function: str | None
    """The one function that its declared batched form serves; None if the calls run one by one."""
    batched_by: str | None


def plan(
    dependencies: Dependencies, costs: Costs, capacity: Capacity, *, declared: bool, in_turn: bool = False
) -> Batches:
    """Group the calls of a program, in O((n + e) log n).

    Args:
        dependencies: the dependencies of the program with its calls split.
        costs: the costs of its nodes and calls.
        capacity: the capacity of one message.
        declared: whether a function's declared batched form may be used if there is one.
        in_turn: whether distributed autograd runs the step, which serves the calls of one message in turn.
    """
    planner = _Planner(dependencies, costs, capacity, declared=declared, in_turn=in_turn)
    # Grouping may turn an order between two calls of one kind into an order between two messages, and so into a cycle.
    # In that case every order counts: calls connected by a path are never grouped.
    found = planner.plan(separate=False) or planner.plan(separate=True)
    assert found is not None  # noqa: S101 - groups of calls that no path connects leave no cycle
    return found


class _Planner:
    """The facts about one program, and the groups formed so far."""

    def __init__(
        self, dependencies: Dependencies, costs: Costs, capacity: Capacity, *, declared: bool, in_turn: bool
    ) -> None:
        self.dependencies, self._costs = dependencies, costs
        self._capacity = capacity
        self._in_turn = in_turn
        effects = self.dependencies.effects
        self._nodes = effects.nodes
        parts = enumerate(effects.per_node)
        candidates = [at for at, does in parts if does.part is Part.ISSUE and may_travel(effects.nodes[at])]
        self._calls = _typical(self._costs, [effects.nodes[at] for at in candidates])
        self._in_turn_pays = self._served_in_turn() if declared else set[tuple[str, str]]()
        self._kinds = {at: kind for at in candidates if (kind := self._kind(effects.nodes[at])) is not None}
        self._earliest = _EarliestArrivals(self.dependencies, self._costs, self._calls)

    def plan(self, *, separate: bool) -> Batches | None:
        """Return the groups; None if they would create a cycle.

        Args:
            separate: whether calls of one kind go to different groups if one must come before the other.
        """
        kinds: dict[int, Hashable] = {
            position: position if separate else kind for position, kind in self._kinds.items()
        }
        level = levels(self.dependencies, kinds)
        together: dict[tuple[_Kind, int], list[int]] = {}
        for position, kind in self._kinds.items():
            together.setdefault((kind, level[position]), []).append(position)
        groups: list[tuple[int, ...]] = []
        forms: list[str | None] = []
        declined: list[Declined] = []
        for (kind, _), positions in together.items():
            for group in self._divided(positions):
                if (reason := self._against(group, kind)) is not None:
                    declined.extend(
                        Declined(node=call_name(self._nodes[position]), reason=reason) for position in group
                    )
                else:
                    groups.append(group)
                    forms.append(kind.batched_by)
        order = _order(self.dependencies, groups) if groups else list(range(len(self._nodes)))
        if order is None:
            return None
        return Batches(
            groups=tuple(groups),
            batched_by=tuple(forms),
            order=tuple(order),
            dependencies=self.dependencies,
            declined=tuple(declined),
        )

    def _kind(self, issue: Node) -> _Kind | None:
        contract = contract_of_call(issue)
        assert contract is not None, issue  # noqa: S101 - callers ask may_travel first
        to, function, _, _, timeout = issue.args
        call = self._calls[issue]
        name = (
            str(function)
            if contract.batched_by is not None and (call.to, call.function) in self._in_turn_pays
            else None
        )
        if name is None and not contract.batchable:
            return None
        batched_by = None if name is None else contract.batched_by
        return _Kind(to=_hashable(to), timeout=_hashable(timeout), function=name, batched_by=batched_by)

    def _served_in_turn(self) -> set[tuple[str, str]]:
        """Return the functions whose declared batched form should serve their calls, with the server.

        The form works through the calls one after another; only a profile can say that this takes no longer than in
        parallel.
        """
        if self._in_turn or not self._costs.measured:
            return set()
        found: dict[tuple[str, str], list[CallCost]] = {}
        for call in self._calls.values():
            found.setdefault((call.to, call.function), []).append(call)
        return {kind for kind, calls in found.items() if _is_quick_in_turn(calls, self._costs.servers[kind[0]])}

    def _against(self, group: Sequence[int], kind: _Kind) -> Reason | None:
        """Return the reason against one message; None if there is none."""
        calls = [self._calls[self._nodes[position]] for position in group]
        if any(call.guessed for call in calls):
            if self._in_turn:
                return Reason.BATCH_SLOWER
            return Reason.BATCH_UNMEASURED if self._earliest.needs_some(group) else None
        in_turn = self._in_turn or kind.batched_by is not None
        slower = _slower_together(calls, self._costs.servers[calls[0].to], in_turn=in_turn)
        return Reason.BATCH_SLOWER if slower else None

    def _divided(self, positions: Iterable[int]) -> Iterator[tuple[int, ...]]:
        calls = sorted(map(self._earliest.of, positions), key=lambda each: (each.ready_s, each.position))
        for ready in _runs(calls, self._may_leave_together):
            ready.sort(key=lambda each: (each.lands_s, each.position))
            for crowd in _runs(ready, self._may_land_together):
                together = sorted(call.position for call in crowd)
                yield from (group for group in self._capped(together) if len(group) > 1)

    def _may_leave_together(self, calls: Sequence[_EarliestArrival]) -> bool:
        """Return whether waiting for the last call to be ready delays no issue too long, or only unneeded answers."""
        gap_s = calls[-1].ready_s - calls[0].ready_s
        return gap_s <= min(call.tolerance_s for call in calls) or (
            self._costs.measured and self._may_land_together(calls)
        )

    def _may_land_together(self, calls: Sequence[_EarliestArrival]) -> bool:
        """Return whether the trainer has enough other work until the last of their answers arrives."""
        return not self._earliest.idles(calls)

    def _capped(self, positions: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Divide calls, in program order, such that no message exceeds its capacity; larger calls go alone."""
        members: list[int] = []
        carried = 0
        for position in positions:
            call = self._costs.messages[self._nodes[position]].calls[0]
            size = call.request_bytes + call.response_bytes if self._costs.measured else 0
            if members and (len(members) >= self._capacity.calls or carried + size > self._capacity.bytes):
                yield tuple(members)
                members, carried = [], 0
            members.append(position)
            carried += size
        if members:
            yield tuple(members)


def _is_quick_in_turn(calls: Sequence[CallCost], server: ServerProfile) -> bool:
    """Return whether calls of one function end no later one after another than in parallel, if they may run so.

    The comparison allows for measurement noise: without threads, the server has less work.
    """
    contract = calls[0].contract
    if contract is None or not contract.batchable:
        return True
    return together_s(calls, server, in_turn=True) <= (1.0 + _NOISE) * together_s(calls, server, in_turn=False)


def may_travel(issue: Node) -> bool:
    """Return whether the call only reads, may be batched, and has exactly one wait."""
    contract = contract_of_call(issue)
    if contract is None or not contract.is_read or not (contract.batchable or contract.batched_by):
        return False
    return is_plain_call(issue)


def is_plain_call(issue: Node) -> bool:
    """Return whether the node issues a call of a function (not a method of an RRef) that has exactly one wait."""
    if issue.target is not ops.issue_call or function_name(issue).startswith(".") or len(issue.users) != 1:
        return False
    # A function may be an argument of a single call only: the wire accepts it nowhere else.
    return not any(value.target is functions.resolve for value in issue.all_input_nodes)


def kind_of_message(issue: Node) -> Hashable:
    """Return what calls of one message have in common: destination and timeout."""
    return _hashable(issue.args[0]), _hashable(issue.args[4])


def _runs(
    calls: Sequence[_EarliestArrival], fit: Callable[[Sequence[_EarliestArrival]], bool]
) -> Iterator[list[_EarliestArrival]]:
    """Divide calls into runs, each as long as its calls fit together, in O(n log n)."""
    begin = 0
    while begin < len(calls):
        fits = functools.partial(_fit_so_many, fit, calls, begin)
        end = begin + _longest(fits, len(calls) - begin)
        yield list(calls[begin:end])
        begin = end


def _fit_so_many(
    fit: Callable[[Sequence[_EarliestArrival]], bool], calls: Sequence[_EarliestArrival], begin: int, count: int
) -> bool:
    return fit(calls[begin : begin + count])


def _longest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the greatest count that fits, in O(log count) tries; one always fits, and so does less than what fits."""
    known, step = 1, 1
    while known < limit and fits(min(known + step, limit)):
        known, step = min(known + step, limit), 2 * step
    beyond = min(known + step, limit + 1)
    while beyond - known > 1:
        middle = (known + beyond) // 2
        known, beyond = (middle, beyond) if fits(middle) else (known, middle)
    return known


def _order(dependencies: Dependencies, groups: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the program's order, changed as little as makes each group adjacent; None if that is impossible."""
    count = len(dependencies.edges)
    head = list(range(count))  # each group is represented by its last member
    members = {group[-1]: group for group in groups}
    for group in groups:
        for position in group:
            head[position] = group[-1]
    missing = [0] * count
    followers: list[list[int]] = [[] for _ in range(count)]
    for position in range(count):
        for source in dependencies.sources(position):
            if head[source] != head[position]:
                missing[head[position]] += 1
                followers[head[source]].append(head[position])
    ready = [position for position in range(count) if head[position] == position and not missing[position]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        position = heapq.heappop(ready)
        order.extend(members.get(position, (position,)))
        for follower in followers[position]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, follower)
    return order if len(order) == count else None


def _hashable(value: object) -> Hashable:
    return value if isinstance(value, (Node, str, float, int)) else repr(value)


_ALIKE = 4.0
"""Factor, up or down, within which service times of one function at one server count as equal but for noise, and the
time of a step's first issue as that of the others."""


def _typical(costs: Costs, issues: Iterable[Node]) -> Mapping[Node, CallCost]:
    """Return single calls with the usual service time of their function at their server, in linear time.

    The usual time is the median of all of them without their transfer, plus the transfer of the call's own bytes. A
    call whose measurement is altogether different keeps it. Nothing of the first issue of a step is in the processor's
    caches, whichever call that is: it counts no longer than the others to its server.

    Args:
        costs: the costs of the program.
        issues: the issues of single calls.
    """
    calls = {issue: costs.messages[issue].calls[0] for issue in issues}
    stays_s: dict[tuple[str, str], list[float]] = {}
    for call in calls.values():
        stays_s.setdefault((call.to, call.function), []).append(_stay_s(call, costs))
    middle_s = {kind: median(measured) for kind, measured in stays_s.items()}
    first = next(iter(costs.messages), None)
    if first in calls:
        calls[first] = _as_a_later_one(calls[first], [call for issue, call in calls.items() if issue is not first])
    return {issue: _as_usual(call, middle_s[call.to, call.function], costs) for issue, call in calls.items()}


def _as_a_later_one(first: CallCost, others: Sequence[CallCost]) -> CallCost:
    """Return the first call of a step as if another one were: issued in the usual time, unless it takes far longer."""
    issues_s = [call.issue_s for call in others if call.to == first.to]
    if not issues_s or not (usual_s := median(issues_s)) < first.issue_s <= _ALIKE * usual_s:
        return first
    return replace(first, issue_s=usual_s)


def _as_usual(call: CallCost, usual_s: float, costs: Costs) -> CallCost:
    own_s = _stay_s(call, costs)
    if own_s == usual_s or not usual_s <= _ALIKE * own_s <= _ALIKE * _ALIKE * usual_s:
        return call
    return replace(call, service_s=usual_s + call.service_s - own_s)


def _stay_s(call: CallCost, costs: Costs) -> float:
    """Return the part of a call's service time that is not transfer, in seconds."""
    return max(call.service_s - transfer_s(call, costs.servers[call.to]), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EarliestArrival:
    """One call: when it may be issued, in seconds from the start of the step, and how long its answer takes."""

    position: int
    """Position of its issue in the program."""
    ready_s: float
    service_s: float
    tolerance_s: float
    """Seconds by which it may be issued, or answered, later for the sake of a shared message."""

    @property
    def lands_s(self) -> float:
        """Seconds until the answer arrives if the call is issued as soon as it is ready."""
        return self.ready_s + self.service_s


class _EarliestArrivals:
    """The earliest arrivals of the calls of one program, and the other work that the trainer could do meanwhile."""

    def __init__(self, dependencies: Dependencies, costs: Costs, calls: Mapping[Node, CallCost]) -> None:
        """Find the longest path to each node, in linear time.

        Args:
            dependencies: the dependencies of the program.
            costs: the costs of the program.
            calls: calls by their issues; the figures of other calls come from the costs.
        """
        effects = dependencies.effects
        self._nodes, self._index, self._per_node = effects.nodes, effects.index, effects.per_node
        self._costs, self._calls = costs, calls
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._busy_s = 0.0
        """The trainer's work that needs no answer; for as long as it takes, no answer is missed."""
        needs_answer: list[bool] = []
        for position, node in enumerate(effects.nodes):
            begins, after_answer = 0.0, effects.per_node[position].part in _ANSWERS
            for source in dependencies.sources(position):
                begins = max(begins, self._ends[source])
                after_answer = after_answer or needs_answer[source]
            needs_answer.append(after_answer)
            lasts = calls[node].issue_s if node in calls else costs.seconds.get(node, 0.0)
            if not after_answer and effects.per_node[position].part is Part.LOCAL:
                self._busy_s += lasts
            self._starts.append(begins)
            self._ends.append(begins + lasts + self._answer_s(node))

    def of(self, position: int) -> _EarliestArrival:
        """Return the arrival of the call that is issued at position `position`."""
        call = self._calls[self._nodes[position]]
        tolerance_s = max(_saved_s(call), _NOISE * call.service_s)
        return _EarliestArrival(
            position=position, ready_s=self._ends[position], service_s=call.service_s, tolerance_s=tolerance_s
        )

    def idles(self, calls: Sequence[_EarliestArrival]) -> bool:
        """Return whether the trainer would idle for longer than tolerated if all answers came together.

        It would if it had run out of other work by then, and the first answers alone would let it go on with work or
        with further calls. Work that also needs one of the last answers does not count: it starts late anyway.

        Args:
            calls: at least one call, each with exactly one wait.
        """
        tolerance_s = min(call.tolerance_s for call in calls)
        soon_s = max(call.ready_s for call in calls) + max(call.service_s for call in calls) - tolerance_s
        if max(min(call.lands_s for call in calls), self._busy_s) >= soon_s:
            return False
        waiting = [wait for call in calls for wait in self._nodes[call.position].users]
        seen, found_s = set(waiting), 0.0
        while waiting:
            for user in waiting.pop().users:
                position = self._index[user]
                if user in seen or self._starts[position] >= soon_s:
                    continue
                seen.add(user)
                waiting.append(user)
                found_s += self._worth_s(user)
                if found_s > tolerance_s:
                    return True
        return False

    def needs_some(self, group: Sequence[int]) -> bool:
        """Return whether calls, or significant work, need some answers of a group and not all.

        In one message they would have to wait for the last of the answers, whichever that is. Work is significant from
        a fraction of what the message saves, since its costs may also be guesses.

        Args:
            group: positions of issues, each with exactly one wait.
        """
        every, issues = (1 << len(group)) - 1, [self._nodes[position] for position in group]
        needs = {self._index[wait]: 1 << number for number, issue in enumerate(issues) for wait in issue.users}
        left_s = _UNSURE * sum(_saved_s(self._calls[issue]) for issue in issues[1:])
        waits, ahead = frozenset(needs), sorted(needs)
        while ahead:
            position = heapq.heappop(ahead)
            if (
                needs[position] == every or self._per_node[position].commits
            ):  # writes come after all earlier answers in any case
                continue
            node = self._nodes[position]
            left_s -= 0.0 if position in waits else self._worth_s(node)
            if left_s < 0:
                return True
            for user in map(self._index.__getitem__, node.users):
                if user not in needs:
                    heapq.heappush(ahead, user)
                needs[user] = needs.get(user, 0) | needs[position]
        return False

    def _worth_s(self, node: Node) -> float:
        """Return how long a node, and the call that it issues, would take, in seconds."""
        message = self._costs.messages.get(node)
        return max(self._costs.seconds.get(node, 0.0), _NODE_S) + (0.0 if message is None else message.service_s)

    def _answer_s(self, node: Node) -> float:
        """Return how long a wait or a blocking call waits for its answer, in seconds."""
        if node not in self._costs.results:
            return 0.0
        sender = node.args[0] if node not in self._costs.messages else node
        known = self._calls.get(sender) if isinstance(sender, Node) else None
        return (known or self._costs.results[node]).service_s


def _saved_s(call: CallCost) -> float:
    """Return what a call costs the trainer's thread if it travels alone, in seconds."""
    return call.issue_s + call.wait_s


def _slower_together(calls: Sequence[CallCost], server: ServerProfile, *, in_turn: bool) -> bool:
    """Return whether calls end clearly later as one batch than if issued one by one.

    Both ways are simulated by the network model, with nothing else in flight. One message is less work for all
    processes, so if the two are equally good, up to measurement noise, calls travel together.

    Args:
        calls: calls to one server.
        server: the profile of the server.
        in_turn: whether the server runs the calls of a batch one after another, instead of in parallel.
    """
    separate_s = _over_s([message_of((call,), server, serial=False) for call in calls], server)
    return together_s(calls, server, in_turn=in_turn) > (1.0 + _NOISE) * separate_s


def together_s(calls: Sequence[CallCost], server: ServerProfile, *, in_turn: bool) -> float:
    """Return in how many seconds calls end that are issued now as one batch, with nothing else in flight."""
    return _over_s([message_of(tuple(calls), server, serial=in_turn)], server)


def _over_s(messages: Sequence[MessageCost], server: ServerProfile) -> float:
    network, now_s, trips = Network({message.to: server for message in messages}), 0.0, list[Trip]()
    for message in messages:
        now_s += message.issue_s
        trips.append(network.send(message, now_s))
    for trip in trips:
        now_s = max(now_s, network.arrival_s(trip)) + trip.message.calls[0].wait_s
    return now_s
