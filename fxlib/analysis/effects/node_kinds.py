"""The behaviour of each node of a graph, before it is known how values share memory.

A node plays one of a few parts in a program: a source of values, local work, one half of a call, or a fence that
nothing may cross, because it may do anything or because it begins or ends a grad-mode or autocast block.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from typing import get_origin

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel

from fxlib.analysis.effects.resources import contract_of_call
from fxlib.analysis.operators import operator_tables as words
from fxlib.analysis.operators.arguments import depends_on_arguments, operator_of, shared_arguments, written_arguments
from fxlib.analysis.operators.schemas import OperatorFacts, attribute, facts_of, makes_container, module_operator
from fxlib.reasons import Reason
from fxlib.runtime.attributes import read_attribute
from fxlib.runtime.data_parallel import DataParallel, body_of, broadcasts, is_ordinary, tensors_of
from fxlib.runtime.ops.calls import is_call, is_issue, is_wait
from fxlib.runtime.ops.registry import OPERATORS, TRACKERS, Role, is_batch, waits_of
from fxlib.runtime.submodules import all_have_hooks, local_modules, local_tensors, submodule

_PYTHON = frozenset({"_operator", "builtins"})


class _Receivers:
    """Answers whether the object whose method a node calls is a tensor, or may be an object of the user's own.

    A graph names methods, not the classes they belong to: `add` may be a method of a tensor, or of a meter that is
    passed to the forward. A pure method of a tensor is called for its result, so a call without a user suggests another
    object, and may do anything. Methods that only ask for a size are left out, since no object acts on those. Each node
    is visited once, however long the chain of method calls.
    """

    def __init__(self, module: GraphModule) -> None:
        """Look up attributes and submodules in `module`."""
        self._module = module
        self._tensors: dict[Node, bool] = {}

    def calls_object(self, node: Node) -> bool:
        """Return whether the node calls a method of what may be an object of the user's own."""
        if node.op != "call_method" or node.target in words.QUERIES:
            return False
        return not self._is_tensor(node.args[0] if node.args else None)

    def reads_object(self, node: Node) -> bool:
        """Return whether the node reads an attribute of such an object, other than those that every tensor has."""
        if node.target not in (getattr, read_attribute) or node.args[1] in words.PLAIN_ATTRIBUTES:
            return False
        return not self._is_tensor(node.args[0])

    def _is_tensor(self, value: object) -> bool:
        """Return whether torch's own work made the value; methods and Python's operators depend on their argument."""
        path: list[Node] = []
        found: bool | None = False
        while isinstance(value, Node):
            found = self._tensors[value] if value in self._tensors else self._by_itself(value)
            path.append(value)
            if found is not None:
                break
            value = value.args[0] if value.args else None
        self._tensors.update(dict.fromkeys(path, bool(found)))
        return bool(found)

    def _by_itself(self, value: Node) -> bool | None:
        """Return whether a value is a tensor; None if that depends on its first argument."""
        if value.op == "get_attr":
            return isinstance(attribute(self._module, str(value.target)), torch.Tensor)
        if value.op == "call_module":
            return type(self._module.get_submodule(str(value.target))).__module__.startswith("torch.nn.")
        if value.op == "placeholder" or (value.target not in TRACKERS and operator_of(value) is None):
            return False
        plain = value.op == "call_function" and getattr(value.target, "__module__", None) not in _PYTHON
        return True if plain else None


_JOINING: frozenset[object] = frozenset({operator.add, operator.mul, operator.or_})
"""Operators that join or repeat lists, or join dicts, and also work on tensors."""


def containers_made(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that join containers or slice one, in one pass over a program.

    `+` adds tensors and joins lists, and `|` joins dicts. A sum of tensors has memory of its own; a joined list holds
    the same tensors as its parts. A value that nothing in the graph shows to be a container counts as a tensor.
    """
    found: set[Node] = set()
    for node in nodes:
        if node.target in _JOINING:
            if any(_is_container(each, found) for each in node.args):
                found.add(node)
        elif node.target is operator.getitem and isinstance(node.args[1], slice) and _is_container(node.args[0], found):
            found.add(node)
    return found


def _is_container(value: object, made: set[Node]) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return True
    if not isinstance(value, Node):
        return False
    if value in made:
        return True
    if value.op == "placeholder":
        kind = get_origin(value.type) or value.type
        return isinstance(kind, type) and issubclass(kind, (tuple, list, dict))
    contract = contract_of_call(value)
    declared = contract is not None and isinstance(contract.structure, (tuple, list, Mapping))
    return declared or (value.op in ("call_function", "call_method") and makes_container(value.target))


class Part(IntEnum):
    """The part that a node plays; an int, which hashes faster, since every node is looked up."""

    INPUT = auto()
    """A placeholder, or a setting that holds for the whole forward; these come first."""
    STATE = auto()
    """A `get_attr`: a parameter, a buffer, or another object of the module."""
    LOCAL = auto()
    """Work in this process."""
    CALL = auto()
    """A call in its blocking form."""
    ISSUE = auto()
    """The first half of a call, or the creation of an RRef, which has no second half."""
    WAIT = auto()
    """The second half of a call."""
    FENCE = auto()
    """A node that nothing crosses."""
    OUTPUT = auto()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Behaviour:
    """The behaviour of one node: `operator` is the effect of local work on its arguments, `fence` a fence's reason."""

    part: Part
    operator: OperatorFacts | None = None
    fence: Reason | None = None

    @property
    def is_impure(self) -> bool:
        """Whether removing the node would lose something even if nothing used its value."""
        if self.part is Part.LOCAL:
            return self.operator is None or self.operator.has_effects
        return self.part is not Part.STATE


_FIXED = {part: Behaviour(part=part) for part in Part}
_OPAQUE = Behaviour(part=Part.FENCE, fence=Reason.OPAQUE_NEIGHBOUR)
_OUTSIDE_PAIR = Behaviour(part=Part.FENCE, fence=Reason.ALREADY_ASYNC)
_MODE = Behaviour(part=Part.FENCE, fence=Reason.MODE_BLOCK)
_TRACK = Behaviour(part=Part.LOCAL, operator=OperatorFacts(name="track_gradient", shares=True, raises=True))
_REFERENCE = Behaviour(part=Part.LOCAL, operator=OperatorFacts(name="make_rref", shares=True, same=True, raises=True))
_OF_ROLES = {
    Role.CREATE: _FIXED[Part.ISSUE],
    Role.LIMIT: _FIXED[Part.INPUT],
    Role.REFERENCE: _REFERENCE,
    Role.TRACK: _TRACK,
}
_OWN = {each.function: _OF_ROLES[each.role] for each in OPERATORS if each.role in _OF_ROLES}
"""The behaviour of fxlib's own operators that are neither calls nor plain work, by their roles."""
_JOINED = Behaviour(part=Part.LOCAL, operator=facts_of(operator.concat))
_PARTS = {"placeholder": Part.INPUT, "get_attr": Part.STATE, "output": Part.OUTPUT}

_MODES: frozenset[object] = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
    }
)


@functools.cache
def _local(operator: OperatorFacts) -> Behaviour:
    return Behaviour(part=Part.LOCAL, operator=operator)


class Behaviours:
    """The behaviour of any node of one module; each operator and submodule is looked up once."""

    def __init__(self, module: GraphModule) -> None:
        """Look up the submodules that `call_module` nodes name in `module`."""
        self._module = module
        self._receivers = _Receivers(module)
        self._plain: dict[object, Behaviour] = {}
        self._local: set[object] = set()
        """Targets that are not calls."""
        self._submodules: dict[object, Behaviour] = {}

    def of(self, node: Node) -> Behaviour:
        """Return what the node does."""
        if (part := _PARTS.get(node.op)) is not None:
            return _FIXED[part]
        if node.op == "call_module":
            return self._submodule(node.target)
        if not node.users and self.may_act(node):
            return _OPAQUE
        return self._of_target(node)

    def may_act(self, node: Node) -> bool:
        """Return whether a method without effects on a tensor may belong to another object, and change that."""
        if node.op != "call_method":
            return False
        operator = self._of_target(node).operator
        return operator is not None and not operator.writes and self._receivers.calls_object(node)

    def may_change(self, node: Node) -> bool:
        """Return whether the node reads something that a method assumed to be a tensor's may have changed."""
        return self._receivers.reads_object(node)

    @functools.cached_property
    def _containers(self) -> set[Node]:
        return containers_made(self._module.graph.nodes)

    def _of_target(self, node: Node) -> Behaviour:
        if node.target in _JOINING and node in self._containers:
            return _JOINED
        known = self._plain.get(node.target)
        if known is not None and not (node.kwargs and depends_on_arguments(node)):
            return known
        if node.target not in self._local:
            if (call := self._call_of(node)) is not None:
                return call
            self._local.add(node.target)
        found = self._operator(node)
        if not depends_on_arguments(node):
            self._plain[node.target] = found
        return found

    @staticmethod
    def _operator(node: Node) -> Behaviour:
        if node.target in _MODES:
            return _MODE
        operator = operator_of(node)
        return _OPAQUE if operator is None else _local(operator)

    def _submodule(self, target: object) -> Behaviour:
        if target not in self._submodules:
            called = submodule(self._module, str(target))
            parallel = isinstance(called, (DataParallel, DistributedDataParallel))
            operator = self._data_parallel(str(target), called) if parallel else module_operator(called)
            known = operator is not None
            self._submodules[target] = Behaviour(part=Part.LOCAL, operator=operator) if known else _OPAQUE
        return self._submodules[target]

    def _data_parallel(self, path: str, called: nn.Module) -> OperatorFacts | None:
        """Return what a `DistributedDataParallel` does: the work of the module inside, and its communication.

        The result is None if it may do anything, or if its parameters are also used outside of it: then the position of
        its forward alone does not decide when backward reduces their gradients.
        """
        body = body_of(called)
        inside = module_operator(called.module) if body is None else body_operator(body)  # type: ignore[arg-type]
        if inside is None or all_have_hooks() or not is_ordinary(called) or self._is_used_beside(path, called):
            return None
        state, joins = tensors_of(called), broadcasts(called)
        buffers = (each for each in state if joins and not isinstance(each, nn.Parameter))
        return replace(
            inside,
            name="DistributedDataParallel",
            state=state,
            written_state=(*inside.written_state, *buffers),
            reduces=True,
            joins=joins,
        )

    def _is_used_beside(self, path: str, called: nn.Module) -> bool:
        own, reached = {id(each) for each in tensors_of(called)}, {id(each) for _, each in local_modules(called)}
        for _, module in local_modules(self._module):
            held = (*module._parameters.values(), *module._buffers.values())
            if id(module) not in reached and not own.isdisjoint(map(id, held)):
                return True
        reading = (node for node in self._module.graph.nodes if node.op in ("get_attr", "call_module"))
        return any(str(node.target).startswith(f"{path}.") for node in reading)

    @staticmethod
    def _call_of(node: Node) -> Behaviour | None:
        if is_call(node):
            return _FIXED[Part.CALL]
        if is_issue(node):
            return _FIXED[Part.ISSUE] if _is_waited_for(node) else _OUTSIDE_PAIR
        if is_wait(node):
            future = node.args[0]
            paired = isinstance(future, Node) and is_issue(future) and _is_waited_for(future)
            return _FIXED[Part.WAIT] if paired else _OUTSIDE_PAIR
        return _OWN.get(node.target)  # type: ignore[arg-type]


def body_operator(body: GraphModule) -> OperatorFacts | None:
    """Return what calling a module that is itself a graph does; None if it may do anything, or makes remote calls.

    Memory that may belong to an argument or to the module is followed through the graph; a write to any of it counts as
    a write to all of it.
    """
    lookup = Behaviours(body)
    given, held = set[Node](), set[Node]()
    written_state: list[torch.Tensor] = []
    random = raises = writes = changes = False
    names = [str(node.target) for node in body.graph.nodes if node.op == "placeholder"]
    for node in body.graph.nodes:
        behaviour, operator = lookup.of(node), lookup.of(node).operator
        if behaviour.part is Part.INPUT:
            given.add(node)
        elif behaviour.part is Part.STATE:
            held.add(node)
        elif behaviour.part is Part.LOCAL and operator is not None and not operator.reduces:
            written = set(written_arguments(node, operator))
            writes, changes = writes or not given.isdisjoint(written), changes or not held.isdisjoint(written)
            random, raises = random or operator.random, raises or operator.raises
            written_state.extend(operator.written_state)
            if operator.shares:
                sources = set(shared_arguments(node, operator))
                given |= {node} if sources & given else set()
                held |= {node} if sources & held or operator.state else set()
        elif behaviour.part is not Part.OUTPUT and behaviour.fence is not Reason.MODE_BLOCK:
            return None
    results = next(node for node in reversed(body.graph.nodes) if node.op == "output").all_input_nodes
    shares = any(node in given or node in held for node in results)
    state = tuple(local_tensors(body).values())  # a captured model's own `parameters` may leave some out
    return OperatorFacts(
        name=type(body).__name__,
        shares=shares,
        same=shares,
        writes=frozenset((*range(len(names)), *names)) if writes else frozenset(),
        random=random,
        raises=raises,
        state=state,
        written_state=state if changes else tuple(written_state),
    )


def _is_waited_for(issue: Node) -> bool:
    """Return whether only waits use what was issued; each call of a batch has a wait."""
    if is_batch(issue):
        return waits_of(issue) is not None
    return all(is_wait(user) for user in issue.users)
