"""What each node of a graph does, before anything is known of how its values share memory.

A node is one of a few parts of a program: a place where values come from, local work, one half of a call, or a fence
that nothing may cross, because it may do anything or because it begins or ends a grad-mode or autocast block.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from enum import IntEnum, auto

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel

from fxlib.analysis.operators.access import depends_on_arguments, operator_of, shared_arguments, written_arguments
from fxlib.analysis.operators.containers import JOINING, containers_made
from fxlib.analysis.operators.leaf_modules import module_operator
from fxlib.analysis.operators.receivers import Receivers
from fxlib.analysis.operators.schemas import Operator, facts_of
from fxlib.reasons import Reason
from fxlib.runtime import ops
from fxlib.runtime.data_parallel import DataParallel, body_of, broadcasts, is_ordinary, tensors_of
from fxlib.runtime.ops.batches import is_batch, waits_of
from fxlib.runtime.ops.calls import is_call, is_issue, is_wait
from fxlib.runtime.ops.operators import limit_in_flight
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.runtime.submodules import local_modules, submodule


class Part(IntEnum):
    """The part that a node plays: an int, which hashes faster, since every node is asked."""

    INPUT = auto()
    """A placeholder, and what is set for the forward as a whole: always first."""
    STATE = auto()
    """A `get_attr`: a parameter, a buffer, or another object of the module."""
    LOCAL = auto()
    """Work in this process."""
    CALL = auto()
    """A call in its blocking form."""
    ISSUE = auto()
    """The first half of a call, or the creation of an RRef, which has no second half."""
    WAIT = auto()
    """The second half."""
    FENCE = auto()
    """Nothing crosses it."""
    OUTPUT = auto()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Behaviour:
    """One node. `operator` says what local work does to its arguments; `fence`, why nothing crosses."""

    part: Part
    operator: Operator | None = None
    fence: Reason | None = None

    @property
    def is_impure(self) -> bool:
        """Whether something would be lost with the node even though nobody used its value."""
        if self.part is Part.LOCAL:
            return self.operator is None or self.operator.has_effects
        return self.part is not Part.STATE


_FIXED = {part: Behaviour(part=part) for part in Part}
_OPAQUE = Behaviour(part=Part.FENCE, fence=Reason.OPAQUE_NEIGHBOUR)
_OUTSIDE_PAIR = Behaviour(part=Part.FENCE, fence=Reason.ALREADY_ASYNC)
_MODE = Behaviour(part=Part.FENCE, fence=Reason.MODE_BLOCK)
_TRACK = Behaviour(part=Part.LOCAL, operator=Operator(name="track_gradient", shares=True, raises=True))
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
def _local(operator: Operator) -> Behaviour:
    return Behaviour(part=Part.LOCAL, operator=operator)


class Behaviours:
    """The behaviour of any node of one module; each operator and submodule is looked up once."""

    def __init__(self, module: GraphModule) -> None:
        """Take the submodules that `call_module` nodes name from `module`."""
        self._module = module
        self._receivers = Receivers(module)
        self._plain: dict[object, Behaviour] = {}
        self._local: set[object] = set()
        """Targets that are no calls."""
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
        """Whether a method that changes nothing, if it is a tensor's, may be another object's, and change that."""
        if node.op != "call_method":
            return False
        operator = self._of_target(node).operator
        return operator is not None and not operator.writes and self._receivers.calls_object(node)

    def may_change(self, node: Node) -> bool:
        """Whether the node reads what a method that is taken for a tensor's may have changed."""
        return self._receivers.reads_object(node)

    @functools.cached_property
    def _containers(self) -> set[Node]:
        return containers_made(self._module.graph.nodes)

    def _of_target(self, node: Node) -> Behaviour:
        if node.target in JOINING and node in self._containers:
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

    def _data_parallel(self, path: str, called: nn.Module) -> Operator | None:
        """Return what a `DistributedDataParallel` does: what the module inside does, and what it says to other ranks.

        None if it may do anything; or if its parameters have uses outside of it, too: then it is not its forward's
        place alone that decides when backward reduces their gradients.
        """
        body = body_of(called)
        inside = module_operator(called.module) if body is None else body_operator(body)  # type: ignore[arg-type]
        if inside is None or not is_ordinary(called) or self._is_used_beside(path, called):
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
        if node.target is ops.create:
            return _FIXED[Part.ISSUE]
        if node.target is limit_in_flight:
            return _FIXED[Part.INPUT]
        return _TRACK if node.target in TRACKERS else None


def body_operator(body: GraphModule) -> Operator | None:
    """Return what calling a module does that is a graph itself; None if it may do anything, or makes remote calls.

    What may be memory of an argument, or of the module's own, is followed through the graph; a write to any of it
    counts as one to all of it.
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
    return Operator(
        name=type(body).__name__,
        shares=shares,
        same=shares,
        writes=frozenset((*range(len(names)), *names)) if writes else frozenset(),
        random=random,
        raises=raises,
        state=(*body.parameters(), *body.buffers()),
        written_state=(*body.parameters(), *body.buffers()) if changes else tuple(written_state),
    )


def _is_waited_for(issue: Node) -> bool:
    """Whether waits alone use what was issued; of a batch, each of its calls has one."""
    if is_batch(issue):
        return waits_of(issue) is not None
    return all(is_wait(user) for user in issue.users)
