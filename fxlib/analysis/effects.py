"""The one model of what nodes do to the world; every pass asks it, and none has rules of its own.

A node reads and writes resources: a server's state, a tensor's memory through all its aliases, the random generators.
Local work that touches none of them has no effect at all. A fence touches everything. The two halves of a call are one
effect: it begins at the issue and is over at the wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from fxlib.analysis.aliases import Aliases
from fxlib.analysis.behaviour import Behaviour, Behaviours, Part
from fxlib.analysis.operators import Operator, written_arguments
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
        self._known: dict[tuple[object, ...], NodeEffects] = {}
        self._written: dict[int, Storage] = {}
        for node, behaviour in zip(nodes, behaviours, strict=True):
            for each in self._writes(node, behaviour.operator):
                self._written.setdefault(each, Storage(each))
        self._classes = {node: each for node in nodes if (each := aliases.of(node)) in self._written}
        self._outside = [self._written[each] for each in aliases.outside() if each in self._written]

    def describe(self, node: Node, behaviour: Behaviour) -> NodeEffects:
        part, operator = behaviour.part, behaviour.operator
        if part is Part.FENCE:
            return NodeEffects(part=part, fence=behaviour.fence)
        if part in _CALLS:
            return self._call(node, part)
        reads = self._reads(node, operator) if part is Part.LOCAL else ()
        writes = tuple(self._writes(node, operator))
        random = operator is not None and operator.random
        key = (part, reads, writes, random)
        found = self._known.get(key)
        if found is None:
            drawn = [GENERATOR] if random else []
            touched = frozenset(self._written[each] for each in reads)
            written = frozenset([*(self._written[each] for each in writes), *drawn])
            self._known[key] = found = NodeEffects(part=part, reads=touched, writes=written)
        return found

    def _call(self, node: Node, part: Part) -> NodeEffects:
        issue = node.all_input_nodes[0] if part is Part.WAIT else node
        reads, writes = reads_and_writes(issue)
        touched: set[Resource] = {*reads, *(self._written[each] for each in self._reads(issue, None))}
        if contract_of_call(issue) is None and writes:
            # It may run in this very process, on what lies outside of the graph.
            touched |= {GENERATOR, *self._outside}
        return NodeEffects(part=part, reads=frozenset(touched), writes=frozenset(writes))

    def _reads(self, node: Node, operator: Operator | None) -> tuple[int, ...]:
        """Return the classes of written memory that the node reads."""
        if not self._written:
            return ()
        found = tuple(self._classes[value] for value in node.all_input_nodes if value in self._classes)
        if operator is None or not operator.state:
            return found
        return (*found, *sorted(self._aliases.of_state(operator.state) & self._written.keys()))

    def _writes(self, node: Node, operator: Operator | None) -> Iterator[int]:
        if operator is None or not (operator.writes or operator.written_state):
            return
        for value in written_arguments(node, operator):
            yield self._aliases.of(value)
        yield from sorted(self._aliases.of_state(operator.written_state))
