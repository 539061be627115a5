"""Whether gradients are recorded, and which nodes use the tensors that take one, so that their order can be kept.

Autograd runs backward in the reverse order in which forward made its nodes, and adds up the gradients of a tensor in
that order: swapping two uses changes the last bits of the sum. Each use belongs to an *account*, in which one gradient
is summed: that of a parameter, a value, or everything that a container holds. An operator that may return its argument
itself (`contiguous`, dropout in eval mode) shares the account of its argument; if that may be one of several (a list),
their accounts are joined. If memory is written in place, autograd rebuilds the history of its views when they are next
used, so all aliases share one account. A tensor that took no gradient when it was made takes one from then on, if what
is written to it does (`total = torch.zeros(3)`, `total += x`).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Behaviour, Part
from fxlib.analysis.effects.resources import Storage
from fxlib.analysis.operators import operator_tables as words
from fxlib.analysis.operators.arguments import written_arguments
from fxlib.analysis.operators.schemas import OperatorFacts, attribute
from fxlib.reasons import Reason
from fxlib.runtime.guards.folded_weights import FOLDED
from fxlib.runtime.ops.registry import CREATIONS, FETCHES, REFERENCES, TRACKERS
from fxlib.runtime.program_modes import grad_mode_after
from fxlib.runtime.results import returned
from fxlib.runtime.submodules import local_parameters
from fxlib.wire import OpaqueAttribute, OpaqueRRef

_USERS = frozenset({Part.LOCAL, Part.CALL, Part.ISSUE, Part.FENCE})
_RREFS = CREATIONS | REFERENCES
_HELD = "held"
"""The account of all parameters and of everything that this process fetches from itself, which may be a parameter."""

_RETURNED = "returned"
"""The account of all values that a module returns: its caller may give them hooks, which run in the order of backward.

Autograd runs nodes from the last that was made to the first, so that those of two values keep their order if these do.
"""

FOLLOWED = "followed"
"""The account of all calls that receive RRefs which the forward made: each must end before the next begins.

Gradients are not the only reason. In torch 2.13, two threads of a server that release others' RRefs may deadlock: one
holds the lock of RPC's context and waits for the GIL, which the other holds.
"""


class GradientUses:
    """The accounts that each node of a graph adds to in backward."""

    def __init__(self, module: GraphModule, effects: Effects) -> None:
        """Follow gradients through the graph, in its order."""
        self._module = module
        self._effects = effects
        self._takes: dict[Node, bool] = {}
        self._filled: dict[int, int] = {}
        """The alias classes to which something is written that may take a gradient, with the first position of this."""
        self._made_of_filled: set[Node] = set()
        """The nodes that may take a gradient because of such a write, whatever is declared of them."""
        self._accounts: dict[Node, Hashable] = {}
        self._written = {
            each.alias_class: each for of in effects.per_node for each in of.writes if isinstance(each, Storage)
        }
        self._modules: dict[OperatorFacts, tuple[Hashable, ...]] = {}
        self._held: set[Hashable] = set()
        self._returned = frozenset(_returned(effects))
        self._joined: dict[Hashable, Hashable] = {}
        """Joined accounts, each with an account that it was joined with."""
        if any(node.target in FETCHES and self._fetches_own(node) for node in effects.nodes):
            self._held.update(self._account_of_state(each) for each in local_parameters(module).values())
        state = getattr(module, "_fxlib", None)
        recording = state is None or state.conditions.grad_enabled
        for node, behaviour in zip(effects.nodes, effects.behaviours, strict=True):
            inputs = node.all_input_nodes
            recording = grad_mode_after(node, recording)
            self._takes[node] = self._takes_gradient(node, inputs, behaviour, recording=recording)
            self._accounts[node] = self._account(node, inputs, behaviour)
            if self._held and self._fetches_own(node.all_input_nodes[0] if behaviour.part is Part.WAIT else node):
                self._held.add(self._accounts[node])
            self._fill(node, inputs, behaviour, recording=recording)

    def accounts_used(self, node: Node, behaviour: Behaviour) -> list[Hashable]:
        """Return the accounts to which the node's backward adds."""
        used = self._accounts_used(node, behaviour)
        returned = node in self._returned and behaviour.part is Part.LOCAL and node.target not in TRACKERS
        return [*used, _RETURNED] if returned and self.takes_gradient(node) else used

    def _accounts_used(self, node: Node, behaviour: Behaviour) -> list[Hashable]:
        part, operator, takes = behaviour.part, behaviour.operator, self.takes_gradient
        if part is Part.WAIT:  # what a server fetches from here is used while the call is in flight
            return self._followed(node.all_input_nodes[0])
        if part is Part.LOCAL:
            if not takes(node) and (operator is None or not operator.writes):
                return []
        elif part not in _USERS:
            return []
        # A call that tracks a gradient copies its arguments without their history, and uses only the result.
        inputs = node.all_input_nodes[:1] if node.target in TRACKERS else node.all_input_nodes
        position = self._effects.index[node]
        used = [
            self._accounts[value] for value in inputs if self._takes[value] or self._is_filled(value, before=position)
        ]
        if operator is not None and operator.state:
            used.extend(self._accounts_of_module(operator))
        if part is not Part.LOCAL:
            used += self._followed(node)
        if self._held and not self._held.isdisjoint(used):
            used.append(_HELD)
        return list(map(self._root, used)) if self._joined else used

    def takes_gradient(self, node: Node) -> bool:
        """Return whether the node's value may take a gradient."""
        return self._takes[node] or self._is_filled(node)

    def _is_filled(self, value: Node, *, before: int | None = None) -> bool:
        """Return whether a value may take a gradient that was written to it, anywhere or before a position."""
        if not self._filled or _is_integer(value):
            return False
        operator = self._effects.behaviours[self._effects.index[value]].operator
        if operator is not None and not operator.gradient and operator.name not in words.FILLABLE:
            return False
        first = self._filled.get(self._effects.aliases.of(value))
        return value in self._made_of_filled or (first is not None and (before is None or first < before))

    def _fill(self, node: Node, inputs: Sequence[Node], behaviour: Behaviour, *, recording: bool) -> None:
        """Note the memory to which a node may write what takes a gradient, or that it lets take one."""
        operator, written = behaviour.operator, list[Node]()
        if behaviour.part is Part.FENCE:
            written = list(inputs) if recording and behaviour.fence is Reason.OPAQUE_NEIGHBOUR else []
        elif operator is not None and operator.writes:
            gives = operator.name == "requires_grad_" or (recording and any(map(self.takes_gradient, inputs)))
            written = list(written_arguments(node, operator)) if gives else []
        for each in map(self._effects.aliases.of, written):
            self._filled.setdefault(each, self._effects.index[node])

    def _takes_gradient(self, node: Node, inputs: Sequence[Node], behaviour: Behaviour, *, recording: bool) -> bool:
        known, operator = _declared(node), behaviour.operator
        computes = (operator is None or operator.gradient) and not _is_integer(node)
        if known is False and recording and computes and any(map(self._is_filled, inputs)):
            self._made_of_filled.add(node)
            return True
        if behaviour.part is Part.STATE:
            value = attribute(self._module, str(node.target))
            if isinstance(value, OpaqueAttribute):
                return not isinstance(value, OpaqueRRef)
            return _may_be_unfrozen(value) or bool(known) or getattr(value, "requires_grad", False)
        if known is not None:
            return known
        if operator is None or node.kwargs.get("requires_grad") not in (None, False):
            return True
        if not operator.gradient:
            return False
        return bool(operator.state or operator.writes) or any(map(self.takes_gradient, inputs))

    def _account(self, node: Node, inputs: Sequence[Node], behaviour: Behaviour) -> Hashable:
        operator = behaviour.operator
        if self._written and (alias_class := self._effects.aliases.of(node)) in self._written:
            return self._written[alias_class]
        if behaviour.part is Part.STATE:
            return self._account_of_state(attribute(self._module, str(node.target)))
        if own := self._led_to(node, inputs, behaviour):
            inputs = own
        elif operator is None or not operator.same or not inputs:
            return node
        if operator is not None and operator.name == "getitem" and _indexes_a_tensor(node):
            return node
        account = self._accounts[inputs[0]]
        if len(inputs) > 1 and (operator is None or operator.name not in words.RETURN_FIRST):
            for each in inputs[1:]:
                if self.takes_gradient(each):
                    self._join(account, self._accounts[each])
        return account

    def _followed(self, call: Node) -> list[Hashable]:
        """Return the accounts of what a server may fetch for a call, and the one account of all such calls."""
        given: list[Node] = []
        map_arg(call.args[1:], lambda each: given.append(each) if each.target in _RREFS else None)
        held = [self._root(self._accounts[each]) for each in given if self.takes_gradient(each)]
        return [*held, FOLLOWED] if given else []

    def _led_to(self, node: Node, inputs: Sequence[Node], behaviour: Behaviour) -> list[Node]:
        """Return the objects of this process that a value is, or refers to by an RRef that the forward made."""
        if node.target in REFERENCES:
            return list(inputs)
        if behaviour.part is Part.WAIT and inputs[0].target in FETCHES:
            inputs = inputs[0].all_input_nodes
        elif node not in self._effects.aliases.references and node.target not in FETCHES:
            return []
        return [each for each in inputs if each in self._effects.aliases.references]

    def _join(self, one: Hashable, other: Hashable) -> None:
        """Join two accounts."""
        one, other = self._root(one), self._root(other)
        if one != other:
            self._joined[other] = one

    def _root(self, account: Hashable) -> Hashable:
        """Return the account that stands for all those joined with it."""
        path = []
        while account in self._joined:
            path.append(account)
            account = self._joined[account]
        self._joined.update(dict.fromkeys(path, account))
        return account

    def _fetches_own(self, node: Node) -> bool:
        """Return whether the node fetches what this process itself may own, such as a parameter."""
        if node.target not in FETCHES or not isinstance(rref := node.args[0], Node) or rref.op != "get_attr":
            return False
        try:
            return bool(getattr(attribute(self._module, str(rref.target)), "is_owner", _unknown)())
        except Exception:  # noqa: BLE001 - whatever stands for an RRef of another process
            return True

    def _accounts_of_module(self, operator: OperatorFacts) -> tuple[Hashable, ...]:
        """Return the accounts of a module's parameters, cached because modules are called repeatedly."""
        if operator not in self._modules:
            parameters = (tensor for tensor in operator.state if isinstance(tensor, torch.nn.Parameter))
            self._modules[operator] = tuple(self._account_of_state(tensor) for tensor in parameters)
        return self._modules[operator]

    def _account_of_state(self, value: object) -> Hashable:
        """Return the account of state that the module holds, whether a node or a submodule uses it."""
        if self._written and isinstance(value, torch.Tensor):
            shared = self._effects.aliases.of_state([value]) & self._written.keys()
            if shared:
                return self._written[min(shared)]
        return id(value)


def _unknown() -> bool:
    return True


def _may_be_unfrozen(value: object) -> bool:
    """Return whether it is a parameter that may take a gradient by the time of a step, whatever it did at capture."""
    return isinstance(value, torch.nn.Parameter) and (value.is_floating_point() or value.is_complex())


def _returned(effects: Effects) -> Iterator[Node]:
    """Yield what makes the values that a graph returns, or writes to them, if it returns several."""
    values = returned(effects.nodes[0].graph) if effects.nodes else []
    if len(values) < 2:
        return
    memory = set(map(effects.aliases.of, values))
    for node, does in zip(effects.nodes, effects.per_node, strict=True):
        if any(isinstance(each, Storage) and each.alias_class in memory for each in does.writes):
            yield node
    for value in values:
        yield value
        part = value
        while part.target is operator.getitem and not _indexes_a_tensor(part):
            part = part.all_input_nodes[0]
            yield part


def _indexes_a_tensor(node: Node) -> bool:
    """Return whether the index cannot be one of a tuple, list or dict, so that the result is a tensor of its own."""
    index: object = node.args[1] if len(node.args) > 1 else None
    return index is None or index is ... or isinstance(index, tuple)


def _declared(node: Node) -> bool | None:
    """Return what the node itself declares about its value."""
    known = node.meta.get("requires_grad")
    if isinstance(known, bool):
        return known
    return False if _is_integer(node) else None


def _is_integer(node: Node) -> bool:
    """Return whether a node's value is known to hold integers or truth values, which take no gradient."""
    tensor = node.meta.get("tensor_meta")
    dtype = None if tensor is None else getattr(tensor, "dtype", None)
    return isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)


def may_record_gradients(module: GraphModule) -> bool:
    """Return whether the module may record gradients: it was captured so, or turns that on, and no pass drops them.

    Values that a pass computed from weights that take a gradient drop it, and the original runs where one is wanted.
    Values computed from buffers alone drop nothing.
    """
    state = getattr(module, "_fxlib", None)
    recorded = state is None or state.conditions.grad_enabled or not respects_no_grad(module)
    folded = (attribute(module, name) for node in module.graph.nodes for name in node.meta.get(FOLDED, ()))
    return recorded and not any(getattr(weight, "requires_grad", False) for weight in folded)


def respects_no_grad(module: GraphModule) -> bool:
    """Return whether the graph records no gradients if run without recording, i.e. does not turn it on by itself.

    In a graph that was captured with recording on, the end of a block without recording turns it on.
    """
    return not any(node.target is torch._C._set_grad_enabled and node.args[0] for node in module.graph.nodes)
