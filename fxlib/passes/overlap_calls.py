"""Put calls and work into an order in which they overlap."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.blame import Blame, remedy_for
from fxlib.analysis.calls import Pair, Reordering, pairs_of
from fxlib.analysis.dependencies import Dependencies
from fxlib.analysis.effects import NodeEffects
from fxlib.analysis.resources import contract_of_call, destination, function_name
from fxlib.analysis.schedule import overlapped_order
from fxlib.passes.base import GraphPass, PassResult, register_pass
from fxlib.reasons import Declined, Reason
from fxlib.result import CallReport


@register_pass("overlap_calls", preserves="bitwise")
class OverlapCalls(GraphPass):
    """Issue calls as early, and wait for them as late, as effects and the order of gradients allow.

    A graph in which no call gains anything keeps its order.
    """

    @override
    def run(self, module: GraphModule) -> PassResult:
        dependencies = Dependencies.of(module)
        order = overlapped_order(dependencies)
        reordering = Reordering(dependencies, order)
        reports = _reports(dependencies, reordering)
        moved = sum(report.action == "moved" for report in reports)
        if moved:
            arrange([dependencies.effects.nodes[place] for place in order])
        declined = (_as_declined(report) for report in reports if report.action == "left_alone")
        return PassResult(module, changes=moved, declined=tuple(declined), calls=reports)


def arrange(order: Sequence[Node]) -> None:
    """Relink all nodes of a graph in `order`."""
    previous = order[0]
    for node in order[1:]:
        if previous.next is not node:
            previous.append(node)
        previous = node


def _reports(dependencies: Dependencies, reordering: Reordering) -> tuple[CallReport, ...]:
    gains = [(pair, reordering.gain(pair)) for pair in pairs_of(dependencies)]
    blame = Blame(dependencies, reordering) if any(gain is None for _, gain in gains) else None
    return tuple(_report(dependencies, pair, gain, blame) for pair, gain in gains)


def _report(dependencies: Dependencies, pair: Pair, gain: Reason | None, blame: Blame | None) -> CallReport:
    effects = dependencies.effects
    node = effects.nodes[pair.issue]
    if gain is not None or blame is None:
        found = Declined(node=node.name, reason=gain or Reason.NOTHING_TO_OVERLAP, remedy=_remedy(node, effects[node]))
    else:
        found = blame.of(pair)
    return CallReport(
        node=str(node.meta.get("call", node.name)),
        function=function_name(node),
        to=destination(node) or str(node.args[0] if node.args else ""),
        action="left_alone" if gain is None else "moved",
        reason=found.reason,
        detail=found.detail,
        remedy=found.remedy,
        source=str(node.meta.get("source", "")),
    )


def _as_declined(report: CallReport) -> Declined:
    return Declined(node=report.node, reason=report.reason, detail=report.detail, remedy=report.remedy)


def _remedy(node: Node, does: NodeEffects) -> str:
    """Return the declaration that would free a call that moved, but less than it might have."""
    return remedy_for(node) if does.commits and contract_of_call(node) is None else ""
