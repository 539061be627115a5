"""Put calls and work into an order in which they overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Graph, GraphModule, Node
from typing_extensions import override

from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.cost.simulate import simulate
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.model import NodeEffects
from fxlib.analysis.effects.resources import contract_of_call, function_name, speaks_to
from fxlib.analysis.scheduling.explain_blocked import Blame, remedy_for
from fxlib.analysis.scheduling.in_flight import Limits
from fxlib.analysis.scheduling.reordering import Pair, Reordering, pairs_of, was_split
from fxlib.analysis.scheduling.schedule import Schedule, closed, overlapped_order
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.remote.explain_exposed import Limit, limits_on
from fxlib.reasons import Declined, Reason
from fxlib.runtime.ops.batches import is_batch, items_of
from fxlib.runtime.ops.operators import limit_in_flight
from fxlib.runtime.ops.record import call_name
from fxlib.spec.report import Action, CallReport


@register_pass("overlap_calls", preserves="bitwise", version="3")
class OverlapCalls(GraphPass):
    """Issue calls as early, and wait for them as late, as effects, the order of gradients and the limits allow.

    What comes first is decided by the costs of nodes and calls: from the profile where there is one. A graph in which
    no call gains anything keeps its order. The limits are those of `scheduling.in_flight`; the captured module
    enforces those on calls and bytes in flight once more, as it runs.
    """

    memory_bytes: int | None = None
    """The most bytes held at once above what the program holds in its own order; None: no limit."""
    calls_in_flight: int | None = None
    """Messages under way to each destination; None: no limit."""
    bytes_in_flight: int | None = None
    """The most bytes of arguments and results in flight to each destination; None: no limit."""

    def __post_init__(self) -> None:
        """Refuse limits that nothing could keep."""
        for name in ("memory_bytes", "calls_in_flight", "bytes_in_flight"):
            value, least = getattr(self, name), 0 if name == "memory_bytes" else 1
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")

    @property
    def limits(self) -> Limits:
        """The options, as the scheduler takes them."""
        return Limits(
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
            arrange([dependencies.effects.nodes[place] for place in plan.order])
            if self.limits.of_flight:
                set_in_flight_limits(module.graph, self.limits)
        declined = (_as_declined(report) for report in reports if report.action == "left_alone")
        return PassResult(module, changes=moved, declined=tuple(declined), calls=reports)


class _Plan:
    """The scheduler's order, with what overlaps nothing put together again."""

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
        """Say what becomes of each call."""
        gains = [(pair, self._reordering.gain(pair)) for pair in self._pairs]
        needed = any(gain is None for _, gain in gains) and not self._schedule.kept
        blame = Blame(self._dependencies, self._reordering) if needed else None
        limits = self._limits()
        return tuple(_limited(self._report(pair, gain, blame), limits.get(pair.wait)) for pair, gain in gains)

    def _limits(self) -> Mapping[int, Limit]:
        """Say what keeps each call exposed, where there are measured costs to tell it by."""
        if not self._costs.measured:
            return {}
        nodes = self._dependencies.effects.nodes
        step = simulate([nodes[place] for place in self.order], self._costs)
        return limits_on(self._pairs, self._dependencies, self.order, self._costs, step)

    def _report(self, pair: Pair, gain: Reason | None, blame: Blame | None) -> CallReport:
        report = _report(self._dependencies, pair, gain, blame)
        if self._schedule.kept:
            return replace(report, reason=Reason.LIMIT_KEEPS_ORDER, remedy="raise the limit")
        if pair.issue in self._schedule.held:
            return replace(report, limited_by=Reason.HELD_BACK)
        return report

    def _was_split(self, pair: Pair) -> bool:
        return pair.issue != pair.wait and was_split(self._dependencies.effects.nodes[pair.wait])


def _limited(report: CallReport, limit: Limit | None) -> CallReport:
    if limit is None or report.limited_by is not None:
        return report
    return replace(report, limited_by=limit.reason, limit_detail=limit.detail)


def arrange(order: Sequence[Node]) -> None:
    """Relink all nodes of a graph in `order`."""
    previous = order[0]
    for node in order[1:]:
        if previous.next is not node:
            previous.append(node)
        previous = node


def _report(dependencies: Dependencies, pair: Pair, gain: Reason | None, blame: Blame | None) -> CallReport:
    effects = dependencies.effects
    node = effects.nodes[pair.issue]
    call = effects.nodes[pair.wait] if is_batch(node) else node
    if is_batch(node):
        reason = Reason.COALESCED if gain is None else Reason.MOVED_TOGETHER
        found = Declined(node=node.name, reason=reason, detail=f"{len(items_of(node)) - 1} others")
    elif gain is not None or blame is None:
        found = Declined(node=node.name, reason=gain or Reason.NOTHING_TO_OVERLAP, remedy=_remedy(node, effects[node]))
    else:
        found = blame.of(pair)
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
    """Return the declaration that would free a call that moved, but less than it might have."""
    return remedy_for(node) if does.commits and contract_of_call(node) is None else ""


def set_in_flight_limits(graph: Graph, limits: Limits) -> None:
    """Put the limits on calls and bytes in flight at the beginning of the forward, in place of those there."""
    for node in graph.find_nodes(op="call_function", target=limit_in_flight):
        graph.erase_node(node)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(limit_in_flight, (limits.calls_in_flight, limits.bytes_in_flight))
