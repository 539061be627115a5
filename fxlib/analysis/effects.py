"""The one model of what nodes do to the world; every pass asks it, and none has rules of its own.

A node reads and writes resources: a server's state, a tensor's memory through all its aliases, the random generators.
Local work that touches none of them has no effect at all. A fence touches everything. The two halves of a call are one
effect: it begins at the issue and is over at the wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from fxlib.analysis.aliases import Aliases
from fxlib.analysis.behaviour import Behaviour, Behaviours, Part
from fxlib.analysis.operators import written_arguments
from fxlib.analysis.resources import GENERATOR, Resource, ServerState, Storage, contract_of_call, reads_and_writes
from fxlib.reasons import Reason

_CALLS = frozenset({Part.CALL, Part.ISSUE, Part.WAIT})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeEffects:
    """What one node does. Memory that nobody in the graph writes is left out: reading it conflicts with nothing."""

    part: Part
    reads: frozenset[Resource] = frozenset()
    writes: frozenset[Resource] = frozenset()
    fence: Reason | None = None

    @property
    def commits(self) -> bool:
        """Whether it starts something on a server that cannot be taken back."""
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
            index={node: place for place, node in enumerate(nodes)},
            behaviours=behaviours,
            aliases=aliases,
            per_node=[analyst.describe(node, each) for node, each in zip(nodes, behaviours, strict=True)],
        )

    def __getitem__(self, node: Node) -> NodeEffects:
        return self.per_node[self.index[node]]


class _Analyst:
    """Turns behaviours into effects, once it is known which memory is written at all."""

    def __init__(self, aliases: Aliases, nodes: Sequence[Node], behaviours: Sequence[Behaviour]) -> None:
        self._aliases = aliases
        self._pure = {part: NodeEffects(part=part) for part in Part}
        self._written: set[int] = set()
        for node, behaviour in zip(nodes, behaviours, strict=True):
            self._written |= self._writes(node, behaviour)
        self._outside = frozenset(Storage(each) for each in aliases.outside() if each in self._written)

    def describe(self, node: Node, behaviour: Behaviour) -> NodeEffects:
        if behaviour.part is Part.FENCE:
            return NodeEffects(part=Part.FENCE, fence=behaviour.fence)
        if behaviour.part in _CALLS:
            return self._call(node, behaviour.part)
        operator = behaviour.operator
        plain = operator is None or not operator.has_effects
        if plain and not self._written:
            return self._pure[behaviour.part]
        reads: frozenset[Resource] = frozenset(self._memory_read(node, behaviour))
        writes: frozenset[Resource] = frozenset(map(Storage, self._writes(node, behaviour)))
        if operator is not None and operator.random:
            writes |= {GENERATOR}
        if plain and not reads and not writes:
            return self._pure[behaviour.part]
        return NodeEffects(part=behaviour.part, reads=reads, writes=writes)

    def _call(self, node: Node, part: Part) -> NodeEffects:
        issue = node.all_input_nodes[0] if part is Part.WAIT else node
        reads, writes = reads_and_writes(issue)
        touched: set[Resource] = {*reads, *self._storages(issue.all_input_nodes)}
        if contract_of_call(issue) is None and writes:
            # It may run in this very process, on what lies outside of the graph.
            touched |= {GENERATOR, *self._outside}
        return NodeEffects(part=part, reads=frozenset(touched), writes=frozenset(writes))

    def _memory_read(self, node: Node, behaviour: Behaviour) -> Iterable[Storage]:
        if not self._written or behaviour.part is not Part.LOCAL:
            return ()
        state = behaviour.operator.state if behaviour.operator is not None else ()
        own = self._aliases.of_state(state) & self._written if state else ()
        return {*self._storages(node.all_input_nodes), *map(Storage, own)}

    def _storages(self, nodes: Iterable[Node]) -> set[Storage]:
        if not self._written:
            return set()
        return {Storage(each) for each in map(self._aliases.of, nodes) if each in self._written}

    def _writes(self, node: Node, behaviour: Behaviour) -> set[int]:
        operator = behaviour.operator
        if operator is None or not (operator.writes or operator.written_state):
            return set()
        found = {self._aliases.of(each) for each in written_arguments(node, operator)}
        return found | self._aliases.of_state(operator.written_state)
