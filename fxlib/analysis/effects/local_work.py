"""Whether local work may run at another position of its program, and whether other work may replace it.

A replacement may change which values share memory, and which values others may write to or see.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from operator import getitem

from torch.fx import GraphModule, Node

from fxlib.analysis.effects.gradients import GradientUses
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Behaviours, Part
from fxlib.analysis.effects.resources import Resource, Storage
from fxlib.reasons import Reason
from fxlib.runtime.ops.registry import TRACKERS


class Motion:
    """Answers for one program as it was at the first question; each answer takes time logarithmic in its length."""

    def __init__(self, module: GraphModule, effects: Effects, *, keep_gradients: bool) -> None:
        """Record where the program writes, commits and may do anything.

        Args:
            module: the program.
            effects: the program's effects.
            keep_gradients: whether a tensor's gradients must be summed in their original order.
        """
        self._effects, self._behaviours = effects, Behaviours(module)
        self._fences: list[int] = []
        self._commits: list[int] = []
        self._writes: dict[Resource, list[int]] = defaultdict(list)
        self._uses: dict[Hashable, list[int]] = defaultdict(list)
        self._vouching = _vouching(effects)
        gradients = GradientUses(module, effects) if keep_gradients else None
        self._accounts: list[Sequence[Hashable]] = []
        for position, (node, does) in enumerate(zip(effects.nodes, effects.per_node, strict=True)):
            if does.part is Part.FENCE:
                self._fences.append(position)
            elif does.commits or does.joins:
                self._commits.append(position)
            for each in does.writes:
                self._writes[each].append(position)
            used = () if gradients is None else gradients.accounts_used(node, effects.behaviours[position])
            self._accounts.append(used)
            for account in used:
                self._uses[account].append(position)

    def unfit(self, node: Node) -> Reason | None:
        """Return why a node is not plain work, which computes a result and does nothing else; None if it is."""
        does, operator = self._effects[node], self._effects.behaviours[self._effects.index[node]].operator
        if does.fence is not None:
            return does.fence
        if does.part is not Part.LOCAL or operator is None:
            return Reason.OPAQUE_NEIGHBOUR
        if operator.random:
            return Reason.RANDOM_ORDER
        return Reason.VALUE_WRITTEN if does.writes or operator.writes or operator.written_state else None

    def may_act(self, node: Node) -> bool:
        """Return whether a node would count as code that may do anything if nothing used its value."""
        return self._behaviours.may_act(node)

    def vouches(self, node: Node) -> bool:
        """Return whether a later method without users is known to be a tensor's only because of this node."""
        return node in self._vouching

    def written_from(self, value: Node, at: int) -> bool:
        """Return whether a node at position `at`, or later, writes to the memory of a value."""
        positions = self._writes.get(Storage(self._effects.aliases.of(value)))
        return positions is not None and positions[-1] >= at

    def refusal(self, nodes: Iterable[Node], at: int) -> Reason | None:
        """Return why some of this plain work may not run at position `at`, before the node there; None if all may."""
        positions = {self._effects.index[node] for node in nodes}
        first, last = min(positions), max(positions)
        if self._lies_between(self._fences, min(first, at - 1), max(last, at)):
            return Reason.OPAQUE_NEIGHBOUR
        if self._lies_between(self._commits, first, max(last, at)):
            return Reason.ORDERED_BEFORE_WRITE
        for position in positions:
            low, high = (position, at) if position < at else (at - 1, position)
            for resource in self._effects.per_node[position].reads:
                if self._lies_between(self._writes.get(resource, ()), low, high):
                    return Reason.VALUE_WRITTEN
        return self._gradients_between(positions, at)

    def _gradients_between(self, positions: set[int], at: int) -> Reason | None:
        for position in positions:
            low, high = (position, at) if position < at else (at - 1, position)
            for account in self._accounts[position]:
                uses = self._uses[account]
                if any(each not in positions for each in uses[bisect_right(uses, low) : bisect_left(uses, high)]):
                    return Reason.GRADIENT_ORDER
        return None

    @staticmethod
    def _lies_between(positions: list[int] | tuple[()], low: int, high: int) -> bool:
        """Return whether one of the sorted positions is greater than `low` and smaller than `high`."""
        found = bisect_right(positions, low)
        return found < len(positions) and positions[found] < high


def _vouching(effects: Effects) -> set[Node]:
    found: set[Node] = set()
    for node, behaviour in zip(effects.nodes, effects.behaviours, strict=True):
        operator = behaviour.operator  # a method that writes is taken for a tensor's by its name
        if node.op == "call_method" and not node.users and operator is not None and not operator.writes:
            value = node.args[0] if node.args else None
            while isinstance(value, Node) and value not in found:
                found.add(value)
                value = value.args[0] if value.args else None
    return found


class Escapes:
    """Answers whether one tensor may replace several, or be kept from one forward to the next.

    If others may write to a value's memory, the value is the program's own only where it was computed.
    """

    def __init__(self, effects: Effects) -> None:
        """Record what the program writes, returns, and passes to code that may write."""
        self._aliases = effects.aliases
        self._written = {
            each.alias_class for does in effects.per_node for each in does.writes if isinstance(each, Storage)
        }
        self._returned: set[int] = set()
        self._calls: set[Node] = set()
        self._sent: dict[Node, set[Node]] = {}
        """The calls that send a value that stands for others, or one of these."""
        for node, does in zip(effects.nodes, effects.per_node, strict=True):
            if does.part is Part.FENCE:
                self._written.update(map(self._aliases.of, node.all_input_nodes))
            elif does.part is Part.OUTPUT:
                self._returned.update(map(self._aliases.of, node.all_input_nodes))
            elif does.part is Part.CALL or does.part is Part.ISSUE or node.target in TRACKERS:
                self._calls.add(node)

    def refusal(self, node: Node) -> Reason | None:
        """Return why a node's value must be a new tensor each time; None if it need not."""
        memory = self._memory(node)
        if not memory.isdisjoint(self._written):
            return Reason.VALUE_WRITTEN
        return None if memory.isdisjoint(self._returned) else Reason.VALUE_ESCAPES

    def _memory(self, node: Node) -> set[int]:
        """Return the alias classes of a node's value and, if it is several tensors, of each of these."""
        return {self._aliases.of(each) for each in (node, *node.users) if each is node or each.target is getitem}

    def merge(self, node: Node, earlier: Node) -> Reason | None:
        """Let an earlier value stand for a node's in what calls send, or return why it may not.

        A message that holds one tensor twice is received with one tensor, and the function may write to it.
        """
        ours, theirs = self._senders(node), self._sent.get(earlier)
        if theirs is None:  # found once for each value, which may come to stand for thousands
            theirs = self._sent[earlier] = self._senders(earlier)
        if not ours.isdisjoint(theirs):
            return Reason.SENT_TOGETHER
        theirs |= ours
        return None

    def _senders(self, value: Node) -> set[Node]:
        """Return the calls that send a value, a part of it, or what may hold it."""
        memory, ahead, reached = self._memory(value), [value], {value}
        while ahead:
            new = [each for each in ahead.pop().users if each not in reached]
            reached.update(new)
            ahead.extend(each for each in new if each not in self._calls and self._aliases.of(each) in memory)
        return reached & self._calls


class Sharing:
    """Groups of values that share memory because of the replacements made so far."""

    def __init__(self, effects: Effects) -> None:
        """Begin with the alias classes of the unchanged program."""
        self._aliases, self._escapes = effects.aliases, Escapes(effects)
        self._outside = effects.aliases.outside()
        self._parents: dict[int, int] = {}
        self._stand_ins: dict[Node, Node] = {}
        self._visible: set[int] = set()

    def refusal(self, results: Iterable[Node], inputs: Iterable[Node], *, did: bool, will: bool) -> Reason | None:
        """Return why the memory shared among results and inputs may not change; None if it may, or stays the same.

        Args:
            results: the results of the work that is replaced.
            inputs: the inputs of that work.
            did: whether results may have shared memory with inputs, or among themselves.
            will: whether they may share it from now on.
        """
        if not (did or will):
            return None
        results, values = list(results), [*results, *inputs]
        reasons = [self._escapes.refusal(self.original(each)) for each in values]
        if Reason.VALUE_WRITTEN in reasons:
            return Reason.VALUE_WRITTEN
        groups = {self._group(each) for each in values}
        seen = {each for each in groups if each in self._visible} | {
            self._group(each) for each in values if self._is_seen(each)
        }
        if did and any(self._is_seen(each) for each in results):
            return Reason.VALUE_ESCAPES
        return Reason.VALUE_ESCAPES if will and len(seen) > 1 else None

    def join(self, results: Iterable[Node], inputs: Iterable[Node]) -> None:
        """Record that results and inputs share memory from now on."""
        values = [*results, *inputs]
        groups = {self._group(each) for each in values}
        visible = any(map(self._is_seen, values)) or not groups.isdisjoint(self._visible)
        root = min(groups)
        self._parents.update({each: root for each in groups if each != root})
        if visible:
            self._visible.add(root)

    def stand_in(self, new: Node, old: Node) -> None:
        """Record that a node replaces another one."""
        self._stand_ins[new] = self.original(old)

    def original(self, node: Node) -> Node:
        """Return the node of the original program that computed a value."""
        return self._stand_ins.get(node, node)

    def _is_seen(self, node: Node) -> bool:
        """Return whether the caller or the module holds the value, too."""
        original = self.original(node)
        return self._escapes.refusal(original) is not None or self._aliases.of(original) in self._outside

    def _group(self, node: Node) -> int:
        found = self._aliases.of(self.original(node))
        while found in self._parents:
            found = self._parents[found]
        return found
