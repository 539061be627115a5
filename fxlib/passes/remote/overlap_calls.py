"""Put calls and work into an order in which they overlap, and report why the rest of a call's time is exposed.

The simulated step says when each call was issued, served and waited for. A call is limited by whichever part of its way
makes the trainer stand still the longest: a queue on the server, the transfer, an issue that had to wait for something,
or, if none of these, the lack of work to hide it behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node
from typing_extensions import override

from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.cost.simulate import SimulatedCall, Simulation, simulate
from fxlib.analysis.effects.dependencies import Cause, Dependencies
from fxlib.analysis.effects.model import NodeEffects
from fxlib.analysis.effects.resources import contract_of_call, function_name, speaks_to
from fxlib.analysis.scheduling.explain_blocked import BlockedCalls, remedy_for
from fxlib.analysis.scheduling.reordering import Pair, Reordering, is_idle, pairs_of, was_split
from fxlib.analysis.scheduling.schedule import Schedule, ScheduleLimits, closed, overlapped_order
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import arrange
from fxlib.passes.infra.introduced import Introduced
from fxlib.reasons import Declined, Reason
from fxlib.runtime.ops.operators import limit_in_flight
from fxlib.runtime.ops.registry import Role, is_batch, items_of
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.report import Action, CallReport

_HIDDEN_SHARE = 0.1
"""Share of a call's way, or of the step, up to which exposed time counts as hidden."""
_MOST_SHARE = 0.5
"""Share of the exposed time from which a part of the call's way counts as its limit."""


@register_pass("overlap_calls", preserves="bitwise", introduces=Introduced.with_roles(Role.LIMIT), version="5")
class OverlapCalls(GraphPass):
    """Issue calls as early, and wait for them as late, as effects, the order of gradients and the limits allow.

    The costs of nodes and calls decide what comes first; they come from the profile if there is one. A graph in which
    no call gains anything keeps its order. The limits are those of `scheduling.schedule`; the captured module enforces
    the limits on calls and bytes in flight again as it runs.
    """

    memory_bytes: int | None = None
    """Maximum bytes held at once above what the program holds in its own order; None: no limit."""
    calls_in_flight: int | None = None
    """Maximum number of messages in flight to each destination; None: no limit."""
    bytes_in_flight: int | None = None
    """Maximum bytes of arguments and results in flight to each destination; None: no limit."""

    def __post_init__(self) -> None:
        """Reject limits that nothing could meet."""
        for name in ("memory_bytes", "calls_in_flight", "bytes_in_flight"):
            value, least = getattr(self, name), 0 if name == "memory_bytes" else 1
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")

    @property
    def limits(self) -> ScheduleLimits:
        """The options as limits of the scheduler."""
        return ScheduleLimits(
            memory_bytes=self.memory_bytes,
            calls_in_flight=self.calls_in_flight,
            bytes_in_flight=self.bytes_in_flight,
        )

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        dependencies, costs = context.get(Dependencies), context.costs()
        plan = _Plan(dependencies, costs, overlapped_order(dependencies, costs, self.limits))
        reports = plan.reports()
        moved = sum(report.action == "moved" for report in reports)
        if moved:
            arrange([dependencies.effects.nodes[position] for position in plan.order])
            if self.limits.of_flight:
                set_in_flight_limits(module.graph, self.limits)
        declined = (_as_declined(report) for report in reports if report.action == "left_alone")
        return PassResult(module, changes=moved, declined=tuple(declined), calls=reports)


class _Plan:
    """The scheduler's order, with split calls that overlap nothing put together again."""

    def __init__(self, dependencies: Dependencies, costs: Costs, schedule: Schedule) -> None:
        self._dependencies = dependencies
        self._costs = costs
        self._schedule = schedule
        self._pairs = list(pairs_of(dependencies))
        self.order = schedule.order
        self._reordering = Reordering(dependencies, self.order, costs)
        idle = [pair for pair in self._pairs if not self._reordering.overlaps(pair) and self._was_split(pair)]
        if idle:
            self.order = closed(self.order, idle, dependencies)
            self._reordering = Reordering(dependencies, self.order, costs)

    def reports(self) -> tuple[CallReport, ...]:
        """Return a report of what becomes of each call."""
        gains = [(pair, self._reordering.gain(pair)) for pair in self._pairs]
        needed = any(gain is None for _, gain in gains) and not self._schedule.kept
        blocked = BlockedCalls(self._dependencies, self._reordering) if needed else None
        limits = self._limits()
        return tuple(_limited(self._report(pair, gain, blocked), limits.get(pair.wait)) for pair, gain in gains)

    def _limits(self) -> Mapping[int, _Limit]:
        """Return the reason why each call is exposed, if there are measured costs to tell."""
        if not self._costs.measured:
            return {}
        nodes = self._dependencies.effects.nodes
        step = simulate([nodes[position] for position in self.order], self._costs)
        return _limits_on(self._pairs, self._dependencies, self.order, self._costs, step)

    def _report(self, pair: Pair, gain: Reason | None, blocked: BlockedCalls | None) -> CallReport:
        report = _report(self._dependencies, pair, gain, blocked)
        if self._schedule.kept:
            return replace(report, reason=Reason.LIMIT_KEEPS_ORDER, remedy="raise the limit")
        if pair.issue in self._schedule.held:
            return replace(report, limited_by=Reason.HELD_BACK)
        return report

    def _was_split(self, pair: Pair) -> bool:
        return pair.issue != pair.wait and was_split(self._dependencies.effects.nodes[pair.wait])


def _limited(report: CallReport, limit: _Limit | None) -> CallReport:
    if limit is None or report.limited_by is not None:
        return report
    return replace(report, limited_by=limit.reason, limit_detail=limit.detail)


def _report(dependencies: Dependencies, pair: Pair, gain: Reason | None, blocked: BlockedCalls | None) -> CallReport:
    effects = dependencies.effects
    node = effects.nodes[pair.issue]
    call = effects.nodes[pair.wait] if is_batch(node) else node
    if is_batch(node):
        reason = Reason.COALESCED if gain is None else Reason.MOVED_TOGETHER
        count = len(items_of(node)) - 1
        found = Declined(node=node.name, reason=reason, detail=f"{count} other{'s' * (count != 1)}")
    elif gain is not None or blocked is None:
        found = Declined(node=node.name, reason=gain or Reason.NOTHING_TO_OVERLAP, remedy=_remedy(node, effects[node]))
    else:
        found = blocked.of(pair)
    return CallReport(
        node=call_name(call),
        function=function_name(call),
        to=speaks_to(node),
        action=_action(node, gain),
        reason=found.reason,
        detail=found.detail,
        remedy=found.remedy,
        source=str(call.meta.get("source", "")),
    )


def _action(node: Node, gain: Reason | None) -> Action:
    if gain is None:
        return "merged" if is_batch(node) else "left_alone"
    return "moved"


def _as_declined(report: CallReport) -> Declined:
    return Declined(node=report.node, reason=report.reason, detail=report.detail, remedy=report.remedy)


def _remedy(node: Node, does: NodeEffects) -> str:
    """Return the declaration that would free a call that moved less far than it might have."""
    return remedy_for(node) if does.commits and contract_of_call(node) is None else ""


def set_in_flight_limits(graph: Graph, limits: ScheduleLimits) -> None:
    """Put the limits on calls and bytes in flight at the beginning of the forward, replacing those already there."""
    for node in graph.find_nodes(op="call_function", target=limit_in_flight):
        graph.erase_node(node)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(limit_in_flight, (limits.calls_in_flight, limits.bytes_in_flight))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """Why a call is exposed, and the detail for the reason's sentence."""

    reason: Reason
    detail: str = ""


def _limits_on(
    pairs: Iterable[Pair],
    dependencies: Dependencies,
    order: Sequence[int],
    costs: Costs,
    simulation: Simulation,
) -> Mapping[int, _Limit]:
    """Return what limits each call that is still exposed, by the position of its wait.

    Args:
        pairs: the calls.
        dependencies: the dependencies of the program.
        order: the positions of its nodes, as scheduled.
        costs: the costs that the schedule was planned with.
        simulation: the step in that order.
    """
    causes = _Causes(dependencies, order, costs)
    simulated, nodes, found = simulation.by_call, dependencies.effects.nodes, {}
    for pair in pairs:
        call = simulated.get(call_name(nodes[pair.wait]))
        hidden = call is None or call.exposed_s <= _HIDDEN_SHARE * min(_way_s(call), simulation.step_s)
        if call is not None and not hidden and (limit := causes.of(pair, call)) is not None:
            found[pair.wait] = limit
    return found


def _way_s(call: SimulatedCall) -> float:
    return call.arrived_s - call.issue_from_s


class _Causes:
    """Answers for the exposed calls of one schedule."""

    def __init__(self, dependencies: Dependencies, order: Sequence[int], costs: Costs) -> None:
        self._dependencies = dependencies
        self._nodes = dependencies.effects.nodes
        self._position = {position: at for at, position in enumerate(order)}
        self._costs = costs
        self._followers: dict[int, tuple[int, Cause]] = {}
        """The first dependent of each wait to run, and why it depends on the wait."""
        waits = {dependencies.effects.index[node] for node in costs.results}
        for position in order:
            for source, why in dependencies.before(position):
                if source in waits:
                    self._followers.setdefault(source, (position, why))

    def of(self, pair: Pair, call: SimulatedCall) -> _Limit | None:
        exposed_s = call.exposed_s
        message = self._costs.messages.get(self._nodes[pair.issue])
        if message is None:
            return None
        there_s, back_s = message.latency_s / 2, message.latency_s / 2 + message.intake_s
        queued_s = call.started_s - call.sent_s - there_s
        transfer_s = (call.sent_s - call.issued_s) + (call.arrived_s - call.served_s - back_s)
        if queued_s >= _MOST_SHARE * exposed_s:
            return _Limit(reason=Reason.LIMITED_BY_SERVER, detail=call.to)
        if transfer_s >= _MOST_SHARE * exposed_s:
            return _Limit(reason=Reason.LIMITED_BY_BANDWIDTH, detail=call.to)
        late = call.issue_from_s >= _MOST_SHARE * exposed_s
        return (self._from_above(pair.issue) if late else None) or self._from_below(pair.wait)

    def _from_above(self, position: int) -> _Limit | None:
        """Return what the issue had to wait for: of everything that must come before it, what ran last."""
        before = [each for each in self._dependencies.before(position) if not is_idle(self._nodes[each[0]])]
        if not before:
            return None
        source, why = max(before, key=lambda each: (self._position[each[0]], -each[1]))
        reason = Reason.LIMITED_BY_DATA if why is Cause.DATA else Reason.LIMITED_BY_EFFECT
        return _Limit(reason=reason, detail=_name(self._nodes[source]))

    def _from_below(self, wait: int) -> _Limit:
        """Return what the wait had to come before: of everything that must come after it, what ran first."""
        position, why = self._followers.get(wait, (wait, Cause.DATA))
        if why is Cause.DATA:
            return _Limit(reason=Reason.LIMITED_BY_WORK)
        return _Limit(reason=Reason.LIMITED_BY_EFFECT, detail=_name(self._nodes[position]))


def _name(node: Node) -> str:
    return call_name(node) if "call" in node.meta else node.name
