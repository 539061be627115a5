"""What keeps the rest of a call's time exposed, once a schedule has hidden what it could.

The simulated step says when each call was issued, served and waited for. Whichever part of its way makes the trainer
stand still the longest is its limit: a queue on the server, the transfer, the issue that had to wait for something, or,
where none of these does, that no work is left to hide it behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.cost.simulate import SimulatedCall, Simulation
from fxlib.analysis.effects.dependencies import Dependencies, Why
from fxlib.analysis.scheduling.reordering import Pair, is_idle
from fxlib.reasons import Reason
from fxlib.runtime.ops.record import call_name

_HIDDEN_SHARE = 0.1
"""A call of whose way, or of the step, no more than this is exposed counts as hidden."""
_MOST_SHARE = 0.5
"""Share of the exposed time from which a part of the call's way is taken for its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Why a call is exposed, and what the reason's sentence speaks of."""

    reason: Reason
    detail: str = ""


def limits_on(
    pairs: Iterable[Pair],
    dependencies: Dependencies,
    order: Sequence[int],
    costs: Costs,
    simulation: Simulation,
) -> Mapping[int, Limit]:
    """Return what limits each call that is still exposed, by the place of its wait.

    Args:
        pairs: the calls.
        dependencies: of the program.
        order: the places of its nodes, as scheduled.
        costs: what the schedule was planned with.
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
        self._position = {place: at for at, place in enumerate(order)}
        self._costs = costs
        self._followers: dict[int, tuple[int, Why]] = {}
        """The first that runs of what depends on each wait, and why it does."""
        waits = {dependencies.effects.index[node] for node in costs.results}
        for place in order:
            for source, why in dependencies.before(place):
                if source in waits:
                    self._followers.setdefault(source, (place, why))

    def of(self, pair: Pair, call: SimulatedCall) -> Limit | None:
        exposed_s = call.exposed_s
        message = self._costs.messages.get(self._nodes[pair.issue])
        if message is None:
            return None
        there_s, back_s = message.latency_s / 2, message.latency_s / 2 + message.intake_s
        queued_s = call.started_s - call.sent_s - there_s
        transfer_s = (call.sent_s - call.issued_s) + (call.arrived_s - call.served_s - back_s)
        if queued_s >= _MOST_SHARE * exposed_s:
            return Limit(reason=Reason.LIMITED_BY_SERVER, detail=call.to)
        if transfer_s >= _MOST_SHARE * exposed_s:
            return Limit(reason=Reason.LIMITED_BY_BANDWIDTH, detail=call.to)
        late = call.issue_from_s >= _MOST_SHARE * exposed_s
        return (self._from_above(pair.issue) if late else None) or self._from_below(pair.wait)

    def _from_above(self, place: int) -> Limit | None:
        """Say what the issue had to wait for: the last that ran of what must come before it."""
        before = [each for each in self._dependencies.before(place) if not is_idle(self._nodes[each[0]])]
        if not before:
            return None
        source, why = max(before, key=lambda each: (self._position[each[0]], -each[1]))
        reason = Reason.LIMITED_BY_DATA if why is Why.DATA else Reason.LIMITED_BY_EFFECT
        return Limit(reason=reason, detail=_name(self._nodes[source]))

    def _from_below(self, wait: int) -> Limit:
        """Say what the wait had to come before: the first that ran of what must come after it."""
        place, why = self._followers.get(wait, (wait, Why.DATA))
        if why is Why.DATA:
            return Limit(reason=Reason.LIMITED_BY_WORK)
        return Limit(reason=Reason.LIMITED_BY_EFFECT, detail=_name(self._nodes[place]))


def _name(node: Node) -> str:
    return call_name(node) if "call" in node.meta else node.name
