"""The one model of the effects of nodes; every pass asks it, and none has rules of its own.

A node reads and writes resources: a server's state, a tensor's memory through all its aliases, the random generators.
Local work that touches none of them has no effect. A fence touches everything. The two halves of a call are one effect,
which begins at the issue and ends at the wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from fxlib.analysis.effects.aliases import Aliases
from fxlib.analysis.effects.node_kinds import Behaviour, Behaviours, Part
from fxlib.analysis.effects.resources import (
    COLLECTIVES,
    GENERATOR,
    PEERS,
    PROCESS,
    REDUCTIONS,
    Resource,
    ServerState,
    Storage,
    may_run_here,
    reads_and_writes,
    starts_at_once,
)
from fxlib.analysis.operators.arguments import written_arguments
from fxlib.analysis.operators.schemas import OperatorFacts
from fxlib.capture import builtin_contracts
from fxlib.reasons import Reason

_STARTS = frozenset({Part.CALL, Part.ISSUE})
_CALLS = _STARTS | {Part.WAIT}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeEffects:
    """The effects of one node. Memory that no node of the graph writes is left out: reading it causes no conflict."""

    part: Part
    reads: frozenset[Resource] = frozenset()
    writes: frozenset[Resource] = frozenset()
    fence: Reason | None = None
    writes_input: bool = False
    """Whether the node writes memory that the caller gave."""
    joins: bool = False
    """Whether the node begins something that each peer of a process group takes part in once."""

    @property
    def commits(self) -> bool:
        """Whether the node does something that cannot be undone, on a server or to an input."""
        if self.writes_input:
            return True
        starts = self.part is Part.CALL or self.part is Part.ISSUE
        return starts and any(isinstance(each, ServerState) for each in self.writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """The effects of all nodes of one graph, in its order."""

    nodes: Sequence[Node]
    index: dict[Node, int] = field(repr=False)
    behaviours: Sequence[Behaviour] = field(repr=False)
    aliases: Aliases = field(repr=False)
    per_node: Sequence[NodeEffects] = field(repr=False)

    @classmethod
    def of(cls, module: GraphModule) -> Effects:
        """Analyse a module's graph, in time proportional to its nodes and edges."""
        nodes = list(module.graph.nodes)
        lookup = Behaviours(module)
        behaviours = [lookup.of(node) for node in nodes]
        aliases = Aliases(module, nodes, behaviours)
        analyst = _Analyst(aliases, nodes, behaviours)
        return cls(
            nodes=nodes,
            index={node: position for position, node in enumerate(nodes)},
            behaviours=behaviours,
            aliases=aliases,
            per_node=[analyst.describe(node, each) for node, each in zip(nodes, behaviours, strict=True)],
        )

    def gathered(self, order: Sequence[int], heads: Mapping[int, int], nodes: Sequence[Node]) -> Effects:
        """Return the effects after some issues have been merged: see `Dependencies.gathered`."""
        together: dict[int, list[int]] = {}
        for position, head in heads.items():
            together.setdefault(head, []).append(position)
        left = [position for position in order if heads.get(position, position) == position]
        per_node = [self.per_node[position] for position in left]
        for at, position in enumerate(left):
            if position in together:
                per_node[at] = _union([self.per_node[each] for each in together[position]])
                self.aliases.replace(self.nodes[position], nodes[at])
        return Effects(
            nodes=nodes,
            index={node: position for position, node in enumerate(nodes)},
            behaviours=[self.behaviours[position] for position in left],
            aliases=self.aliases,
            per_node=per_node,
        )

    def __getitem__(self, node: Node) -> NodeEffects:
        return self.per_node[self.index[node]]


def _union(issues: Sequence[NodeEffects]) -> NodeEffects:
    reads, writes = ([getattr(each, name) for each in issues] for name in ("reads", "writes"))
    joins = any(each.joins for each in issues)
    return NodeEffects(part=Part.ISSUE, reads=frozenset().union(*reads), writes=frozenset().union(*writes), joins=joins)


class _Analyst:
    """Turns behaviours into effects, once it is known which memory is written at all."""

    def __init__(self, aliases: Aliases, nodes: Sequence[Node], behaviours: Sequence[Behaviour]) -> None:
        self._aliases = aliases
        self._known: dict[tuple[object, ...], NodeEffects] = {}
        self._written: dict[int, Storage] = {}
        self._state: dict[OperatorFacts, tuple[int, ...]] = {}
        self._written_state: dict[OperatorFacts, list[int]] = {}
        pairs = list(zip(nodes, behaviours, strict=True))
        for node, behaviour in pairs:
            operator = behaviour.operator
            if operator is not None and (operator.writes or operator.written_state):
                for each in self._writes(node, operator):
                    self._written.setdefault(each, Storage(each))
        self._classes = {node: each for node in nodes if (each := aliases.of(node)) in self._written}
        outside = aliases.outside()
        self._outside = [self._written[each] for each in outside if each in self._written]
        self._visited = any(each.part in _STARTS and may_run_here(node) for node, each in pairs)
        self._from_outside = {node for node in nodes if aliases.of(node) in outside} if self._visited else set()

    def describe(self, node: Node, behaviour: Behaviour) -> NodeEffects:
        part, operator = behaviour.part, behaviour.operator
        if part is Part.FENCE:
            return NodeEffects(part=part, fence=behaviour.fence)
        if part in _CALLS:
            return self._call(node, part)
        reads = self._reads(node, operator) if self._written and part is Part.LOCAL else ()
        writes = tuple(self._writes(node, operator)) if self._written else ()
        random = operator is not None and operator.random
        speaks = operator is not None and operator.reduces, operator is not None and operator.joins
        given = bool(writes) and self._aliases.writes_input(node)
        visited = self._visited and self._reads_process(node, operator)
        key = (part, reads, writes, random, given, visited, *speaks)
        found = self._known.get(key)
        if found is None:
            touched: frozenset[Resource] = frozenset(map(self._written.__getitem__, reads))
            written: frozenset[Resource] = frozenset(map(self._written.__getitem__, writes))
            touched |= {PROCESS} if visited else frozenset()
            written |= {GENERATOR} if random else frozenset()
            reduces, joins = speaks
            written |= {REDUCTIONS} if reduces else frozenset()
            written |= {PEERS} if joins else frozenset()
            self._known[key] = found = NodeEffects(
                part=part, reads=touched, writes=written, writes_input=given, joins=joins
            )
        return found

    def _call(self, node: Node, part: Part) -> NodeEffects:
        issue = node.all_input_nodes[0] if part is Part.WAIT else node
        reads, writes = reads_and_writes(issue)
        touched: set[Resource] = {*reads, *(self._written[each] for each in self._reads(issue, None))}
        written: set[Resource] = {*writes}
        if issue.target in COLLECTIVES and part is not Part.WAIT:
            written |= {PEERS, REDUCTIONS}
        if may_run_here(issue):
            touched |= {GENERATOR, *self._outside}
            written.add(PEERS)
            if part is not Part.WAIT or starts_at_once(issue):  # a call to this process has ended when it is issued
                written.add(PROCESS)
        elif part is not Part.WAIT and any(each.name == builtin_contracts.GENERATOR for each in writes):
            touched.add(GENERATOR)
        if part is not Part.WAIT and self._takes_from_outside(issue):
            touched.add(PROCESS)
        joins = part is not Part.WAIT and PEERS in written
        return NodeEffects(part=part, reads=frozenset(touched), writes=frozenset(written), joins=joins)

    def _reads_process(self, node: Node, operator: OperatorFacts | None) -> bool:
        """Return whether the node reads something that a call which runs in this process may have changed."""
        if operator is None:
            return False
        return bool(operator.state) or self._takes_from_outside(node)

    def _takes_from_outside(self, node: Node) -> bool:
        """Return whether a call that runs in this process may have changed a value that the node takes."""
        return any(value in self._from_outside for value in node.all_input_nodes)

    def _reads(self, node: Node, operator: OperatorFacts | None) -> tuple[int, ...]:
        """Return the alias classes of written memory that the node reads."""
        if not self._written:
            return ()
        classes = self._classes
        found = tuple([classes[value] for value in node.all_input_nodes if value in classes])
        if operator is None or not operator.state:
            return found
        return (*found, *self._state_read(operator))

    def _state_read(self, operator: OperatorFacts) -> tuple[int, ...]:
        """Return the alias classes of written memory that a module holds; they are cached, as modules recur."""
        if operator not in self._state:
            self._state[operator] = tuple(sorted(self._aliases.of_state(operator.state) & self._written.keys()))
        return self._state[operator]

    def _writes(self, node: Node, operator: OperatorFacts | None) -> Sequence[int]:
        if operator is None or not (operator.writes or operator.written_state):
            return ()
        found = [self._aliases.of(value) for value in written_arguments(node, operator)]
        if operator.written_state:
            found.extend(self._state_written(operator))
        return found

    def _state_written(self, operator: OperatorFacts) -> list[int]:
        if operator not in self._written_state:
            self._written_state[operator] = sorted(self._aliases.of_state(operator.written_state))
        return self._written_state[operator]
