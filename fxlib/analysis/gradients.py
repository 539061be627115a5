"""Which nodes use which tensors that take a gradient, so that their order can be kept.

Autograd runs backward in the reverse order in which forward made its nodes, and adds up the gradients of a tensor in
that order: swapping two uses changes the last bits of the sum. A use belongs to an *account*, in which one gradient is
added up: a parameter, a value, or all that a container holds. What may return its argument itself (`contiguous`,
dropout in eval mode) shares the account of its argument. Where memory is written in place, autograd rebuilds the
history of its views when they are next used, so all the aliases share one account.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch.fx import GraphModule, Node

from fxlib.analysis.aliases import attribute
from fxlib.analysis.behaviour import Behaviour, Part
from fxlib.analysis.effects import Effects
from fxlib.analysis.resources import Storage

_USERS = frozenset({Part.LOCAL, Part.CALL, Part.ISSUE, Part.FENCE})


class GradientUses:
    """The accounts that each node of a graph adds to in backward."""

    def __init__(self, module: GraphModule, effects: Effects) -> None:
        """Follow gradients through the graph, in its order."""
        self._module = module
        self._effects = effects
        self._takes: dict[Node, bool] = {}
        self._accounts: dict[Node, Hashable] = {}
        self._written = {each.alias_class for of in effects.per_node for each in of.writes if isinstance(each, Storage)}
        for node, behaviour in zip(effects.nodes, effects.behaviours, strict=True):
            self._takes[node] = self._takes_gradient(node, behaviour)
            self._accounts[node] = self._account(node, behaviour)

    def accounts_used(self, node: Node, behaviour: Behaviour) -> Iterator[Hashable]:
        """Yield the accounts to which the node's backward adds."""
        operator = behaviour.operator
        if behaviour.part not in _USERS:
            return
        if behaviour.part is Part.LOCAL and not (self._takes[node] or (operator is not None and operator.writes)):
            return
        for value in node.all_input_nodes:
            if self._takes[value]:
                yield self._accounts[value]
        if operator is not None and operator.state:
            for tensor in operator.state:
                if isinstance(tensor, torch.nn.Parameter):
                    yield id(tensor)

    def _takes_gradient(self, node: Node, behaviour: Behaviour) -> bool:
        known = _declared(node)
        if known is not None:
            return known
        operator = behaviour.operator
        if behaviour.part is Part.STATE:
            value = attribute(self._module, str(node.target))
            return isinstance(value, torch.nn.Parameter) or getattr(value, "requires_grad", False)
        if operator is None:
            return True
        if not operator.gradient:
            return False
        return bool(operator.state) or bool(operator.writes) or any(self._takes[each] for each in node.all_input_nodes)

    def _account(self, node: Node, behaviour: Behaviour) -> Hashable:
        operator = behaviour.operator
        if self._written and (alias_class := self._effects.aliases.of(node)) in self._written:
            return Storage(alias_class)
        if behaviour.part is Part.STATE:
            return id(attribute(self._module, str(node.target)))
        if operator is None or not operator.same or not node.all_input_nodes:
            return node
        if operator.name == "getitem" and _indexes_a_tensor(node):
            return node
        return self._accounts[node.all_input_nodes[0]]


def _indexes_a_tensor(node: Node) -> bool:
    """Whether the index could not be one of a tuple, list or dict, so that the result is a tensor of its own."""
    index: object = node.args[1] if len(node.args) > 1 else None
    return index is None or index is ... or isinstance(index, tuple)


def _declared(node: Node) -> bool | None:
    """Return what is known of the node's value without looking at the graph."""
    known = node.meta.get("requires_grad")
    if isinstance(known, bool):
        return known
    dtype = getattr(node.meta.get("tensor_meta"), "dtype", None)
    if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex):
        return False
    return None
