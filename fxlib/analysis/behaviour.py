"""What each node of a graph does, before anything is known of how its values share memory.

A node is one of a few parts of a program: a place where values come from, local work, one half of a call, or a fence
that nothing may cross, because it may do anything or because it begins or ends a grad-mode or autocast block.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from enum import IntEnum, auto

import torch
from torch.fx import GraphModule, Node

from fxlib.analysis.catalogue import Operator, facts_of
from fxlib.analysis.containers import JOINING, containers_made
from fxlib.analysis.modules import module_operator
from fxlib.analysis.operators import depends_on_arguments, operator_of
from fxlib.analysis.receivers import Receivers
from fxlib.reasons import Reason
from fxlib.runtime import ops
from fxlib.runtime.calls import is_call, is_issue, is_wait
from fxlib.runtime.credits import limit_in_flight
from fxlib.runtime.items import is_batch, waits_of
from fxlib.runtime.paths import submodule


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
            operator = module_operator(submodule(self._module, str(target)))
            known = operator is not None
            self._submodules[target] = Behaviour(part=Part.LOCAL, operator=operator) if known else _OPAQUE
        return self._submodules[target]

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
        return _TRACK if node.target in ops.TRACKERS else None


def _is_waited_for(issue: Node) -> bool:
    """Whether waits alone use what was issued; of a batch, each of its calls has one."""
    if is_batch(issue):
        return waits_of(issue) is not None
    return all(is_wait(user) for user in issue.users)
