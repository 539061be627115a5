"""Whether local work may run at another place of its program, beside work that stands there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from torch.fx import GraphModule, Node

from fxlib.analysis.effects.gradient_order import GradientUses
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Behaviours, Part
from fxlib.analysis.effects.resources import Resource, Storage
from fxlib.reasons import Reason


class Motion:
    """Answers for one program, as it was when asked first; each answer takes the logarithm of its length."""

    def __init__(self, module: GraphModule, effects: Effects, *, keep_gradients: bool) -> None:
        """Note where the program writes, commits and may do anything.

        Args:
            module: the program.
            effects: its effects.
            keep_gradients: a tensor's gradients are to be added up in the order in which they were.
        """
        self._effects, self._behaviours = effects, Behaviours(module)
        self._fences: list[int] = []
        self._commits: list[int] = []
        self._writes: dict[Resource, list[int]] = defaultdict(list)
        self._uses: dict[Hashable, list[int]] = defaultdict(list)
        self._vouching = _vouching(effects)
        gradients = GradientUses(module, effects) if keep_gradients else None
        self._accounts: list[Sequence[Hashable]] = []
        for place, (node, does) in enumerate(zip(effects.nodes, effects.per_node, strict=True)):
            if does.part is Part.FENCE:
                self._fences.append(place)
            elif does.commits or does.joins:
                self._commits.append(place)
            for each in does.writes:
                self._writes[each].append(place)
            used = () if gradients is None else gradients.accounts_used(node, effects.behaviours[place])
            self._accounts.append(used)
            for account in used:
                self._uses[account].append(place)

    def unfit(self, node: Node) -> Reason | None:
        """Return why a node is not plain work, which makes a result and does nothing else; None if it is."""
        does, operator = self._effects[node], self._effects.behaviours[self._effects.index[node]].operator
        if does.fence is not None:
            return does.fence
        if does.part is not Part.LOCAL or operator is None:
            return Reason.OPAQUE_NEIGHBOUR
        if operator.random:
            return Reason.RANDOM_ORDER
        return Reason.VALUE_WRITTEN if does.writes or operator.writes or operator.written_state else None

    def may_act(self, node: Node) -> bool:
        """Whether a node would be taken for one that may do anything, if nobody used its value."""
        return self._behaviours.may_act(node)

    def vouches(self, node: Node) -> bool:
        """Whether a method without users, somewhere after it, is known to be a tensor's only by what this node is."""
        return node in self._vouching

    def written_from(self, value: Node, at: int) -> bool:
        """Whether what stands at the place `at`, or later, writes to the memory of a value."""
        places = self._writes.get(Storage(self._effects.aliases.of(value)))
        return places is not None and places[-1] >= at

    def refusal(self, nodes: Iterable[Node], at: int) -> Reason | None:
        """Return why plain work may not all run at the place `at`, just before what stands there; None if it may."""
        places = {self._effects.index[node] for node in nodes}
        first, last = min(places), max(places)
        if self._lies_between(self._fences, min(first, at - 1), max(last, at)):
            return Reason.OPAQUE_NEIGHBOUR
        if self._lies_between(self._commits, first, at):
            return Reason.ORDERED_BEFORE_WRITE
        for place in places:
            low, high = (place, at) if place < at else (at - 1, place)
            for resource in self._effects.per_node[place].reads:
                if self._lies_between(self._writes.get(resource, ()), low, high):
                    return Reason.VALUE_WRITTEN
        return self._gradients_between(places, at)

    def _gradients_between(self, places: set[int], at: int) -> Reason | None:
        for place in places:
            low, high = (place, at) if place < at else (at - 1, place)
            for account in self._accounts[place]:
                uses = self._uses[account]
                if any(each not in places for each in uses[bisect_right(uses, low) : bisect_left(uses, high)]):
                    return Reason.GRADIENT_ORDER
        return None

    @staticmethod
    def _lies_between(places: list[int] | tuple[()], low: int, high: int) -> bool:
        """Whether one of the sorted places is greater than `low` and smaller than `high`."""
        found = bisect_right(places, low)
        return found < len(places) and places[found] < high


def _vouching(effects: Effects) -> set[Node]:
    found: set[Node] = set()
    for node, behaviour in zip(effects.nodes, effects.behaviours, strict=True):
        operator = behaviour.operator  # what writes is taken for a tensor's by its name
        if node.op == "call_method" and not node.users and operator is not None and not operator.writes:
            value = node.args[0] if node.args else None
            while isinstance(value, Node) and value not in found:
                found.add(value)
                value = value.args[0] if value.args else None
    return found
