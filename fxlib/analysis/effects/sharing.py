"""Whether replacing work may change which values share memory, and which values others may write to or see."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import Storage
from fxlib.reasons import Reason


class Escapes:
    """Answers whether one tensor may stand for several, or be kept from one forward to the next.

    Where others may write to a value's memory, the value is the program's own only where it was computed.
    """

    def __init__(self, effects: Effects) -> None:
        """Note what the program writes, hands to code that may write, and returns."""
        self._aliases = effects.aliases
        self._written = {
            each.alias_class for does in effects.per_node for each in does.writes if isinstance(each, Storage)
        }
        self._returned: set[int] = set()
        for node, does in zip(effects.nodes, effects.per_node, strict=True):
            if does.part is Part.FENCE:
                self._written.update(map(self._aliases.of, node.all_input_nodes))
            elif does.part is Part.OUTPUT:
                self._returned.update(map(self._aliases.of, node.all_input_nodes))

    def refusal(self, node: Node) -> Reason | None:
        """Return why a node's value has to be a tensor of its own, each time; None if it need not."""
        memory = self._aliases.of(node)
        if memory in self._written:
            return Reason.VALUE_WRITTEN
        return Reason.VALUE_ESCAPES if memory in self._returned else None


class Sharing:
    """Groups of values that share memory because of replacements made so far."""

    def __init__(self, effects: Effects) -> None:
        """Begin with the classes of a program as it was."""
        self._aliases, self._escapes = effects.aliases, Escapes(effects)
        self._outside = effects.aliases.outside()
        self._parents: dict[int, int] = {}
        self._stand_ins: dict[Node, Node] = {}
        self._visible: set[int] = set()

    def refusal(self, results: Iterable[Node], inputs: Iterable[Node], *, did: bool, will: bool) -> Reason | None:
        """Return why the sharing of memory among results and inputs may not change; None if it may, or does not.

        Args:
            results: of the work that is replaced.
            inputs: of it.
            did: whether results may have shared memory with inputs, or among themselves.
            will: whether they may from now on.
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
        """Know that results and inputs share memory from now on."""
        values = [*results, *inputs]
        groups = {self._group(each) for each in values}
        visible = any(map(self._is_seen, values)) or not groups.isdisjoint(self._visible)
        root = min(groups)
        self._parents.update({each: root for each in groups if each != root})
        if visible:
            self._visible.add(root)

    def stand_in(self, new: Node, old: Node) -> None:
        """Know that a node gives what another one gave."""
        self._stand_ins[new] = self.original(old)

    def original(self, node: Node) -> Node:
        """Return the node that gave a value in the program as it was."""
        return self._stand_ins.get(node, node)

    def _is_seen(self, node: Node) -> bool:
        """Whether the caller, or the module, has the value, too."""
        original = self.original(node)
        return self._escapes.refusal(original) is not None or self._aliases.of(original) in self._outside

    def _group(self, node: Node) -> int:
        found = self._aliases.of(self.original(node))
        while found in self._parents:
            found = self._parents[found]
        return found
