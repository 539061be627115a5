"""The remote calls of a graph, and how each of them fares when the nodes are put into another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Node

from fxlib.analysis.behaviour import Part
from fxlib.analysis.dependencies import Dependencies
from fxlib.reasons import Reason
from fxlib.runtime.calls import is_issue

_IDLE = frozenset({"placeholder", "get_attr"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two halves of a call, by their places in the program. A call that is one node is both."""

    issue: int
    wait: int


def is_idle(node: Node) -> bool:
    """Whether the node takes no time worth speaking of, so that no call is overlapped with it."""
    return node.op in _IDLE


def pairs_of(dependencies: Dependencies) -> Iterator[Pair]:
    """Yield the calls of a graph, in its order. Of several waits for one call the first counts."""
    effects = dependencies.effects
    for place, (node, behaviour) in enumerate(zip(effects.nodes, effects.behaviours, strict=True)):
        if behaviour.part is Part.CALL:
            yield Pair(issue=place, wait=place)
        elif behaviour.part is Part.ISSUE or (behaviour.part is Part.FENCE and is_issue(node)):
            yield Pair(issue=place, wait=min((effects.index[user] for user in node.users), default=place))


class Reordering:
    """A new order of a program's nodes, and what it does for each call."""

    def __init__(self, dependencies: Dependencies, order: Sequence[int]) -> None:
        """Compare `order` with the program's own, in linear time."""
        nodes = dependencies.effects.nodes
        self.position = [0] * len(order)
        for position, place in enumerate(order):
            self.position[place] = position
        busy = [not is_idle(nodes[place]) for place in order]
        self._busy_until = [0, *accumulate(busy)]
        never, working = len(order), [not is_idle(node) for node in nodes]
        upwards = [self.position[place] if works else -1 for place, works in enumerate(working)]
        downwards = [self.position[place] if works else never for place, works in enumerate(working)]
        self._latest_of_earlier = [-1, *accumulate(upwards, max)]
        self._earliest_of_later = [never, *accumulate(reversed(downwards), min)][::-1]

    def overlaps(self, pair: Pair) -> bool:
        """Whether anything runs between the halves."""
        return self._busy_until[self.position[pair.wait]] - self._busy_until[self.position[pair.issue] + 1] > 0

    def gain(self, pair: Pair) -> Reason | None:
        """Return what the call gained; None if nothing."""
        if not self.overlaps(pair):
            return None
        early = self._latest_of_earlier[pair.issue] > self.position[pair.issue]
        late = self._earliest_of_later[pair.wait + 1] < self.position[pair.wait]
        if early and late:
            return Reason.MOVED
        if early:
            return Reason.ISSUED_EARLY
        return Reason.WAITED_LATE if late else None
