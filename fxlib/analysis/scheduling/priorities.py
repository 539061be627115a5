"""What should come first: how long a program still takes after each node, and which nodes hold up a remote call.

The *tail* of a node is the longest path from its start to the end of the forward, through work and calls in flight: a
node with more tail has less slack. A node is *urgent* if an issue, a write or a fence comes after it with no wait in
between; then its urgency is that one's tail. Sources: list scheduling by critical path (Coffman and Graham, 1972), with
"what unblocks a transfer first" (Hashemi et al., TicTac, MLSys 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.model import NodeEffects
from fxlib.analysis.effects.node_kinds import Part

NEVER = -1.0


class Lane(IntEnum):
    """What kind of step a node is for the scheduler."""

    INPUT = 0
    ISSUE = 1
    """Of a call that may start early."""
    NEEDED = 2
    """Work that such an issue needs, and no wait in between."""
    WORK = 3
    """Other work, and what stays where the program has it: writes on servers, fences."""
    WAIT = 4
    OUTPUT = 5


_LANES = {Part.INPUT: Lane.INPUT, Part.WAIT: Lane.WAIT, Part.OUTPUT: Lane.OUTPUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Priorities:
    """Of every node, by its place in the program."""

    edges: list[list[int]]
    """Places that must come before."""
    seconds: list[float]
    """On the trainer's thread."""
    lanes: list[Lane]
    tails: list[float]
    urgency: list[float]
    """`NEVER` where nothing is held up."""
    critical_path_s: float

    @classmethod
    def of(cls, dependencies: Dependencies, costs: Costs) -> Priorities:
        """Walk the program once, from its end, in time linear in nodes and edges."""
        effects = dependencies.effects
        edges = [dependencies.sources(place) for place in range(len(effects.nodes))]
        seconds = [costs.seconds[node] for node in effects.nodes]
        service = _service(dependencies, costs)
        count = len(edges)
        lanes, tails, urgency, below = [Lane.WORK] * count, [0.0] * count, [NEVER] * count, [0.0] * count
        for place in range(count - 1, -1, -1):
            does = effects.per_node[place]
            lane, anchor = _lane(does), does.commits or does.part is Part.FENCE
            tails[place] = tail = seconds[place] + below[place]
            if lane is Lane.WORK and urgency[place] != NEVER and not anchor:
                lane = Lane.NEEDED
            lanes[place] = lane
            passed = tail if lane is Lane.ISSUE or anchor else urgency[place] if lane is Lane.NEEDED else NEVER
            waits = lane is Lane.WAIT
            for source in edges[place]:
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
    """Return for each issue the time that its calls take, nothing else in flight; 0 for other nodes."""
    service = [0.0] * len(dependencies.effects.nodes)
    for node, message in costs.messages.items():
        service[dependencies.effects.index[node]] = message.service_s
    return service


def _lane(does: NodeEffects) -> Lane:
    if does.part is Part.ISSUE:
        return Lane.WORK if does.commits else Lane.ISSUE
    return _LANES.get(does.part, Lane.WORK)
