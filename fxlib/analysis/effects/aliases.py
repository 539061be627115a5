"""Alias classes: the values of a graph that may share memory, found in one pass; classes only grow.

Two values are in one class if one may be a view of the other, contain it, or be the same tensor. Classes hold for the
whole program, so they are never too small. Inputs may share memory with one another, and so form one class. Inputs are
assumed not to overlap with parameters and buffers, unless the graph itself writes to any of these: then all memory from
outside is one class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import getitem

import torch
from torch.fx import GraphModule, Node

from fxlib.analysis.effects.node_kinds import Behaviour, Part
from fxlib.analysis.operators.arguments import shared_arguments, written_arguments
from fxlib.analysis.operators.schemas import OperatorFacts, attribute, facts_of
from fxlib.runtime.ops.registry import CREATIONS, CROSSING, REFERENCES


class Aliases:
    """The alias classes of one graph. A class is an int; `OUTSIDE` is the class of the inputs."""

    OUTSIDE = 0

    def __init__(
        self,
        module: GraphModule,
        nodes: Sequence[Node],
        behaviours: Sequence[Behaviour],
        *,
        distinct_inputs: bool = False,
    ) -> None:
        """Join values that may share memory, in time proportional to the number of nodes and edges.

        With `distinct_inputs`, inputs, parameters and buffers that did not overlap at capture are known not to overlap.
        """
        self._distinct = distinct_inputs
        self._parents = [self.OUTSIDE]
        self._nodes: dict[Node, int] = {}
        self._state: dict[object, int] = {}
        self._entered: set[OperatorFacts] = set()
        self._held: dict[int, int] = {}
        """Indices in `_state` of the tensors of those operators, by identity."""
        self._explicit: dict[Node, list[Node]] = {}
        self._several: dict[Node, bool] = {}
        self._items: dict[tuple[Node, int], int] = {}
        self.references: set[Node] = set()
        """RRefs through which servers may read memory of this process while a call that was given one is in flight."""
        for node, behaviour in zip(nodes, behaviours, strict=True):
            self._nodes[node] = self._new()
            self._classify(module, node, behaviour)
            if behaviour.operator is not None and behaviour.operator.writes:
                self._explicit[node] = list(written_arguments(node, behaviour.operator))
        self._input_writers = {node for node, written in self._explicit.items() if self._are_inputs(written)}
        if not distinct_inputs and self._outside_is_written():
            for each in self._state.values():
                self._join(each, self.OUTSIDE)

    def of(self, node: Node) -> int:
        """Return the alias class of a node's value."""
        return self._find(self._nodes[node])

    def replace(self, node: Node, by: Node) -> None:
        """Let another node stand for a node that is no longer in the graph."""
        self._nodes[by] = self._nodes.pop(node)

    def of_state(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the alias classes of the parameters and buffers that a module reads or writes by itself."""
        found: set[int] = set()
        for tensor in tensors:
            known = self._held.get(id(tensor)) or self._state.get(_memory(tensor))
            if known is not None:
                found.add(self._find(known))
        return found

    def outside(self) -> set[int]:
        """Return all alias classes of memory from outside the graph."""
        return {self._find(each) for each in (self.OUTSIDE, *self._state.values())}

    def writes_input(self, node: Node) -> bool:
        """Return whether the node writes memory that the caller gave, as opposed to the module's own."""
        return node in self._input_writers

    def _classify(self, module: GraphModule, node: Node, behaviour: Behaviour) -> None:
        own, operator = self._nodes[node], behaviour.operator
        if node.target in REFERENCES or (
            node.target in CREATIONS and not self.references.isdisjoint(node.all_input_nodes)
        ):
            self.references.add(node)
            self._join_all(own, node.all_input_nodes)
        if behaviour.part is Part.INPUT:
            self._join(own, self._input(node) if self._distinct else self.OUTSIDE)
        elif behaviour.part is Part.STATE:
            self._join(own, self._state_of(attribute(module, str(node.target))))
        elif behaviour.part is Part.FENCE:
            self._join_all(own, node.all_input_nodes)
            self._join(own, self.OUTSIDE)
        elif behaviour.part is Part.CALL:
            self._join_all(own, () if node.target in CROSSING else node.all_input_nodes)
        elif behaviour.part is Part.WAIT:
            issue = node.all_input_nodes[0]
            self._join_all(own, () if issue.target in CROSSING else issue.all_input_nodes)
        elif node.target is getitem and (item := self._item(node)) is not None:
            self._join(own, item)
        elif operator is not None and operator.shares:
            self._join_all(own, shared_arguments(node, operator))
        if operator is not None and operator.state and operator not in self._entered:
            self._enter(operator)

    def _input(self, node: Node) -> int:
        """Return the alias class of one input, shared with the inputs that shared its memory at capture."""
        value = node.meta.get("val")
        key = ("input", value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else node
        return self._state.setdefault(key, self._nodes[node])

    def _item(self, node: Node) -> int | None:
        """Return the alias class of one of several results, if each has memory and a name of its own."""
        several, index = node.args
        if not isinstance(several, Node):
            return None
        if several not in self._several:
            self._several[several] = _is_several(several)
        if not self._several[several] or not isinstance(index, int):
            return None
        count = len(several.target._schema.returns)  # type: ignore[union-attr]
        return self._items.setdefault((several, index % count), self._nodes[node])

    def _enter(self, operator: OperatorFacts) -> None:
        """Register a module's own state by its memory, so that a `get_attr` of the same tensor joins it."""
        self._entered.add(operator)
        for tensor in operator.state:
            self._held[id(tensor)] = self._state_of(tensor)

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
        made = len(self._parents)
        self._parents.append(made)
        return made

    def _find(self, item: int) -> int:
        parents = self._parents
        while parents[item] != item:
            parents[item] = parents[parents[item]]
            item = parents[item]
        return item

    def _join(self, one: int, other: int) -> None:
        one, other = self._find(one), self._find(other)
        self._parents[max(one, other)] = min(one, other)

    def _join_all(self, one: int, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._join(one, self._nodes[node])


def _is_several(value: Node) -> bool:
    """Return whether a node's value is a tuple of fresh tensors that nothing uses as a whole."""
    if not isinstance(value.target, torch._ops.OpOverload):
        return False
    found = facts_of(value.target)
    if found is None or found.shares or len(value.target._schema.returns) < 2:
        return False
    return all(user.target is getitem and isinstance(user.args[1], int) for user in value.users)


def _memory(value: object) -> object:
    """Return a key that two tensors over the same memory share."""
    if isinstance(value, torch.Tensor):
        try:
            address = value.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a tensor without storage: a sparse one, or a wrapper
            address = 0
        return ("memory", address) if address else id(value)
    return id(value)
