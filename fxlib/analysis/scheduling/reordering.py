"""The remote calls of a graph, what each gains in another order of the nodes, and which of them may be merged."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Node

from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.node_kinds import Part
from fxlib.reasons import Reason
from fxlib.runtime.ops.calls import is_issue
from fxlib.runtime.ops.registry import CREATIONS, is_batch, waits_of

_IDLE = frozenset({"placeholder", "get_attr"})
_CALL_S = 1e-4
WORTH_S = 5e-7
"""Seconds; work that takes no longer than this is not worth splitting a call for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two halves of a call, by their positions in the program. For a call that is one node, both are the same."""

    issue: int
    wait: int


def is_idle(node: Node) -> bool:
    """Return whether the node takes no significant time, so that overlapping a call with it gains nothing."""
    return node.op in _IDLE


def was_split(wait: Node) -> bool:
    """Return whether both halves were one node in the program as captured."""
    issue = wait.args[0]
    if not isinstance(issue, Node) or not is_issue(issue) or is_batch(issue) or len(issue.users) != 1:
        return False
    order = wait.meta.get("order")
    return order is not None and order == issue.meta.get("order") and wait.meta.get("call") == issue.meta.get("call")


def pairs_of(dependencies: Dependencies) -> Iterator[Pair]:
    """Yield the calls of a graph, in order. If a call has several waits, the first counts.

    Calls of one batch share an issue and have a wait each. A call that leaves its result on the server ends when the
    result has been fetched.
    """
    effects = dependencies.effects
    for position, (node, behaviour) in enumerate(zip(effects.nodes, effects.behaviours, strict=True)):
        if behaviour.part is Part.CALL:
            yield Pair(issue=position, wait=position)
        elif behaviour.part is Part.ISSUE and is_batch(node):
            yield from (Pair(issue=position, wait=effects.index[wait]) for wait in waits_of(node) or ())
        elif behaviour.part is Part.ISSUE or (behaviour.part is Part.FENCE and is_issue(node)):
            yield Pair(issue=position, wait=min((effects.index[user] for user in _ends(node)), default=position))


def _ends(issue: Node) -> Iterator[Node]:
    """Yield the nodes that need what was issued: waits, or for a fetched RRef the wait for its value."""
    for user in issue.users:
        if issue.target in CREATIONS and is_issue(user):
            yield from user.users
        else:
            yield user


class Reordering:
    """A new order of a program's nodes, and its effect on each call."""

    def __init__(self, dependencies: Dependencies, order: Sequence[int], costs: Costs) -> None:
        """Compare `order` with the program's own, in linear time."""
        nodes = dependencies.effects.nodes
        self.new_position = [0] * len(order)
        for new_position, position in enumerate(order):
            self.new_position[position] = new_position
        called = costs.messages.keys() | costs.results.keys()  # standing still for one call hides another
        busy_s = (_CALL_S if nodes[position] in called else costs.seconds[nodes[position]] for position in order)
        self._busy_until_s = [0.0, *accumulate(busy_s)]
        never, working = len(order), [not is_idle(node) for node in nodes]
        upwards = [self.new_position[position] if works else -1 for position, works in enumerate(working)]
        downwards = [self.new_position[position] if works else never for position, works in enumerate(working)]
        self._latest_of_earlier = [-1, *accumulate(upwards, max)]
        self._earliest_of_later = [never, *accumulate(reversed(downwards), min)][::-1]

    def overlaps(self, pair: Pair) -> bool:
        """Return whether any work worth splitting for runs between the halves."""
        first, last = self.new_position[pair.issue] + 1, self.new_position[pair.wait]
        return last > first and self._busy_until_s[last] - self._busy_until_s[first] > WORTH_S

    def gain(self, pair: Pair) -> Reason | None:
        """Return what the call gained; None if nothing."""
        if not self.overlaps(pair):
            return None
        early = self._latest_of_earlier[pair.issue] > self.new_position[pair.issue]
        late = self._earliest_of_later[pair.wait + 1] < self.new_position[pair.wait]
        if early and late:
            return Reason.MOVED
        if early:
            return Reason.ISSUED_EARLY
        return Reason.WAITED_LATE if late else None


_STEPS = frozenset({Part.WAIT, Part.FENCE, Part.CALL})


def levels(dependencies: Dependencies, kinds: Mapping[int, Hashable]) -> list[int]:
    """Return the level of each position of the program, in time proportional to its edges.

    The level of a node is the greatest number of *steps* on a path to it. A step is a wait, a write on a server or a
    fence, and any edge from an issue to something other than its own wait. Levels never fall along a path, and every
    path from one issue to another has a step on it. So no path connects issues of one level, and merging them into one
    node creates no cycle.

    Args:
        dependencies: the dependencies of the program.
        kinds: the kind of each issue that may be merged with others of its kind. An edge between two of one kind is not
            a step, since one message keeps its calls in order.
    """
    effects = dependencies.effects.per_node
    found: list[int] = []
    for position, does in enumerate(effects):
        level = 0
        for source in dependencies.sources(position):
            held = effects[source]
            if source in kinds:
                is_step = does.part is not Part.WAIT and kinds[source] != kinds.get(position)
            else:
                is_step = held.part in _STEPS or held.commits
            level = max(level, found[source] + is_step)
        found.append(level)
    return found
