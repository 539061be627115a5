"""Which values of a graph may share memory: classes that only ever grow, found in one pass over the graph.

Two values are in one class if one may be a view of the other, a container of it, or the very same tensor. A class does
not know about time, so it is never too small. Inputs may share memory with one another, and so are one class. Inputs
are taken to lie apart from parameters and buffers, unless the graph itself writes to any of these: then all memory
that comes from outside is one class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import GraphModule, Node

from fxlib.analysis.behaviour import Behaviour, Part
from fxlib.analysis.catalogue import Operator
from fxlib.analysis.modules import attribute
from fxlib.analysis.operators import written_arguments
from fxlib.runtime import ops

_REMOTE: frozenset[object] = frozenset({ops.remote_call, ops.issue_call, ops.start_call})
"""Calls whose results have crossed a wire, even those to this very process."""


class Aliases:
    """The classes of one graph. A class is an int; `OUTSIDE` is that of the inputs."""

    OUTSIDE = 0

    def __init__(self, module: GraphModule, nodes: Sequence[Node], behaviours: Sequence[Behaviour]) -> None:
        """Join what may share memory, in time proportional to nodes and edges."""
        self._parents = [self.OUTSIDE]
        self._nodes: dict[Node, int] = {}
        self._state: dict[object, int] = {}
        self._entered: set[Operator] = set()
        self._explicit: dict[Node, list[Node]] = {}
        for node, behaviour in zip(nodes, behaviours, strict=True):
            self._nodes[node] = self._new()
            self._place(module, node, behaviour)
            if behaviour.operator is not None and behaviour.operator.writes:
                self._explicit[node] = list(written_arguments(node, behaviour.operator))
        self._input_writers = {node for node, written in self._explicit.items() if self._are_inputs(written)}
        if self._outside_is_written():
            for each in self._state.values():
                self._join(each, self.OUTSIDE)

    def of(self, node: Node) -> int:
        """Return the class of a node's value."""
        return self._find(self._nodes[node])

    def of_state(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the classes of parameters and buffers that a module reads or writes by itself."""
        return {self._find(self._state[key]) for tensor in tensors if (key := _memory(tensor)) in self._state}

    def outside(self) -> set[int]:
        """Return all classes of memory that comes from outside the graph."""
        return {self._find(each) for each in (self.OUTSIDE, *self._state.values())}

    def writes_input(self, node: Node) -> bool:
        """Whether the node writes memory that the caller gave, as opposed to the module's own."""
        return node in self._input_writers

    def _place(self, module: GraphModule, node: Node, behaviour: Behaviour) -> None:
        own, operator = self._nodes[node], behaviour.operator
        if behaviour.part is Part.INPUT:
            self._join(own, self.OUTSIDE)
        elif behaviour.part is Part.STATE:
            self._join(own, self._state_of(attribute(module, str(node.target))))
        elif behaviour.part is Part.FENCE:
            self._join_all(own, node.all_input_nodes)
            self._join(own, self.OUTSIDE)
        elif behaviour.part is Part.CALL:
            self._join_all(own, () if node.target in _REMOTE else node.all_input_nodes)
        elif behaviour.part is Part.WAIT:
            issue = node.all_input_nodes[0]
            self._join_all(own, () if issue.target in _REMOTE else issue.all_input_nodes)
        elif operator is not None and operator.shares:
            self._join_all(own, node.all_input_nodes)
        if operator is not None and operator.state and operator not in self._entered:
            self._enter(operator)

    def _enter(self, operator: Operator) -> None:
        """Know a module's own state by its memory, so that a `get_attr` of the same tensor meets it."""
        self._entered.add(operator)
        for tensor in operator.state:
            self._state_of(tensor)

    def _state_of(self, value: object) -> int:
        key = _memory(value)
        if key not in self._state:
            self._state[key] = self._new()
        return self._state[key]

    def _are_inputs(self, values: Iterable[Node]) -> bool:
        return any(self.of(value) == self._find(self.OUTSIDE) for value in values)

    def _outside_is_written(self) -> bool:
        outside = self.outside()
        return any(self.of(value) in outside for written in self._explicit.values() for value in written)

    def _new(self) -> int:
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def _find(self, item: int) -> int:
        parents = self._parents
        while parents[item] != item:
            parents[item] = parents[parents[item]]
            item = parents[item]
        return item

    def _join(self, one: int, other: int) -> None:
        low, high = sorted((self._find(one), self._find(other)))
        self._parents[high] = low

    def _join_all(self, one: int, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._join(one, self._nodes[node])


def _memory(value: object) -> object:
    """Return what two tensors over the same memory have in common."""
    if isinstance(value, torch.Tensor):
        try:
            address = value.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a tensor without storage: sparse, or a wrapper
            address = 0
        return ("memory", address) if address else id(value)
    return id(value)
