"""The order in which a program overlaps its remote calls with its own work.

List scheduling over the dependencies, with four lanes. Whenever several nodes are ready, the first of these goes next:

1. issues of calls that may start early,
2. the work that such issues still need, shortest chain first,
3. the other work, and writes on servers, in program order,
4. waits, in program order.

So a wait comes when there is nothing else to do, or when something in the third lane is due that cannot go without it:
an issue, or a write. That one takes the place in the third lane of what it holds up. Nothing is issued that the program
would not issue, and the result depends on the graph alone. O((n + e) log n), with the heap of ready nodes.

Related: XLA's latency-hiding scheduler (openxla/xla, xla/service/latency_hiding_scheduler.cc), which ranks by cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from fxlib.analysis.behaviour import Part
from fxlib.analysis.dependencies import Dependencies
from fxlib.analysis.effects import NodeEffects

_INPUT, _ISSUE, _NEEDED, _WORK, _WAIT, _OUTPUT = range(6)
_LANES = {Part.INPUT: _INPUT, Part.WAIT: _WAIT, Part.OUTPUT: _OUTPUT}
_NEVER = -1


def overlapped_order(dependencies: Dependencies) -> list[int]:
    """Return the places of the program's nodes, in the order in which they should run."""
    edges = [dependencies.sources(place) for place in range(len(dependencies.edges))]
    ranks = _ranks(dependencies.effects.per_node, edges)
    followers: list[list[int]] = [[] for _ in edges]
    for place, sources in enumerate(edges):
        for source in sources:
            followers[source].append(place)
    missing = [len(sources) for sources in edges]
    ready = [(ranks[place], place) for place, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)[1]
        order.append(place)
        for follower in followers[place]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (ranks[follower], follower))
    return order


def _ranks(effects: Sequence[NodeEffects], edges: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return each node's lane, and its rank in the lane."""
    depths, due = _depths(edges), [_NEVER] * len(edges)
    needed = [_NEVER] * len(edges)
    ranks: list[tuple[int, int]] = [(_WORK, 0)] * len(edges)
    for place in range(len(edges) - 1, -1, -1):
        does = effects[place]
        lane = _lane(does)
        if lane == _WORK and needed[place] != _NEVER and not _is_anchor(does):
            lane = _NEEDED
        urgency = _NEVER
        if lane == _ISSUE:
            urgency = depths[place]
        elif lane == _NEEDED:
            urgency = needed[place]
        for source in edges[place]:
            if urgency != _NEVER and (needed[source] == _NEVER or urgency < needed[source]):
                needed[source] = urgency
            if urgency != _NEVER or _is_anchor(does):
                due[source] = place if due[source] == _NEVER else min(place, due[source])
        if lane == _WAIT and due[place] != _NEVER:
            ranks[place] = (_WORK, due[place])
        else:
            ranks[place] = (lane, needed[place] if lane == _NEEDED else place)
    return ranks


def _lane(does: NodeEffects) -> int:
    if does.part is Part.ISSUE:
        return _WORK if does.commits else _ISSUE
    return _LANES.get(does.part, _WORK)


def _is_anchor(does: NodeEffects) -> bool:
    """Whether the node stays where the program has it, among the other work."""
    return does.commits or does.part is Part.FENCE


def _depths(edges: Sequence[Sequence[int]]) -> list[int]:
    """Return the length of the longest chain that ends in each node."""
    depths: list[int] = []
    for sources in edges:
        depths.append(1 + max((depths[source] for source in sources), default=0))
    return depths
