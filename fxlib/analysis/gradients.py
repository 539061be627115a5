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

from fxlib.analysis.behaviour import Behaviour, Part
from fxlib.analysis.catalogue import Operator
from fxlib.analysis.effects import Effects
from fxlib.analysis.modules import attribute
from fxlib.analysis.resources import FETCHES, Storage

_USERS = frozenset({Part.LOCAL, Part.CALL, Part.ISSUE, Part.FENCE})
_HELD = "held"
"""The account of all parameters and of what this process fetches from itself, which may be one of them."""


class GradientUses:
    """The accounts that each node of a graph adds to in backward."""

    def __init__(self, module: GraphModule, effects: Effects) -> None:
        """Follow gradients through the graph, in its order."""
        self._module = module
        self._effects = effects
        self._takes: dict[Node, bool] = {}
        self._accounts: dict[Node, Hashable] = {}
        self._written = {each.alias_class for of in effects.per_node for each in of.writes if isinstance(each, Storage)}
        self._modules: dict[Operator, tuple[Hashable, ...]] = {}
        self._held: set[Hashable] = set()
        if any(self._fetches_own(node) for node in effects.nodes):
            self._held.update(self._account_of_state(each) for each in module.parameters())
        for node, behaviour in zip(effects.nodes, effects.behaviours, strict=True):
            self._takes[node] = self._takes_gradient(node, behaviour)
            self._accounts[node] = self._account(node, behaviour)
            if self._held and self._fetches_own(node.all_input_nodes[0] if behaviour.part is Part.WAIT else node):
                self._held.add(self._accounts[node])

    def accounts_used(self, node: Node, behaviour: Behaviour) -> Iterator[Hashable]:
        """Yield the accounts to which the node's backward adds."""
        operator = behaviour.operator
        if behaviour.part not in _USERS:
            return
        if behaviour.part is Part.LOCAL and not (self._takes[node] or (operator is not None and operator.writes)):
            return
        used = [self._accounts[value] for value in node.all_input_nodes if self._takes[value]]
        if operator is not None and operator.state:
            used.extend(self._accounts_of_module(operator))
        yield from used
        if not self._held.isdisjoint(used):
            yield _HELD

    def _takes_gradient(self, node: Node, behaviour: Behaviour) -> bool:
        known, operator = _declared(node), behaviour.operator
        if behaviour.part is Part.STATE:
            value = attribute(self._module, str(node.target))
            return _may_be_unfrozen(value) or bool(known) or getattr(value, "requires_grad", False)
        if known is not None:
            return known
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
            return self._account_of_state(attribute(self._module, str(node.target)))
        if operator is None or not operator.same or not node.all_input_nodes:
            return node
        if operator.name == "getitem" and _indexes_a_tensor(node):
            return node
        return self._accounts[node.all_input_nodes[0]]

    def _fetches_own(self, node: Node) -> bool:
        """Whether the node fetches what this process may own itself, a parameter for one."""
        if node.target not in FETCHES or not isinstance(rref := node.args[0], Node) or rref.op != "get_attr":
            return False
        try:
            return bool(getattr(attribute(self._module, str(rref.target)), "is_owner", _unknown)())
        except Exception:  # noqa: BLE001 - whatever stands for an RRef of another process
            return True

    def _accounts_of_module(self, operator: Operator) -> tuple[Hashable, ...]:
        """Return the accounts of a module's parameters; modules are called over and over."""
        if operator not in self._modules:
            parameters = (tensor for tensor in operator.state if isinstance(tensor, torch.nn.Parameter))
            self._modules[operator] = tuple(self._account_of_state(tensor) for tensor in parameters)
        return self._modules[operator]

    def _account_of_state(self, value: object) -> Hashable:
        """Return the account of what the module holds, whether a node or a submodule uses it."""
        if self._written and isinstance(value, torch.Tensor):
            shared = self._effects.aliases.of_state([value]) & self._written
            if shared:
                return Storage(min(shared))
        return id(value)


def _unknown() -> bool:
    return True


def _may_be_unfrozen(value: object) -> bool:
    """Whether it is a parameter that may take a gradient by the time of a step, whatever it did at capture."""
    return isinstance(value, torch.nn.Parameter) and (value.is_floating_point() or value.is_complex())


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
