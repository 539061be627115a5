"""Whose memory others may write to: a value there is the program's own only where it was computed."""

from __future__ import annotations

from torch.fx import Node

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import Storage
from fxlib.reasons import Reason


class Escapes:
    """Answers whether one tensor may stand for several, or be kept from one forward to the next."""

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

    def hindrance(self, node: Node) -> Reason | None:
        """Return why a node's value has to be a tensor of its own, each time; None if it need not."""
        memory = self._aliases.of(node)
        if memory in self._written:
            return Reason.VALUE_WRITTEN
        return Reason.VALUE_ESCAPES if memory in self._returned else None
