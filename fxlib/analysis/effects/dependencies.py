"""The order that nodes must keep: the graph's own edges, and the edges that its effects require.

The order edges are as few as possible: from a resource's last writer to the nodes that touch it later, from use to use
of a gradient's account, around fences, and from everything between two writes on servers to the second write. Their
number is therefore proportional to nodes, arguments and effects, and one pass builds them all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from torch.fx import GraphModule, Node

from fxlib.analysis.effects.gradients import FOLLOWED, GradientUses
from fxlib.analysis.effects.model import Effects, NodeEffects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import (
    COLLECTIVES,
    Generator,
    Peers,
    Process,
    Reductions,
    Resource,
    ServerState,
    is_collective,
)


class Cause(IntEnum):
    """The cause of a dependency."""

    DATA = 0
    FENCE = 1
    MEMORY = 2
    RANDOM = 3
    SERVER = 4
    COMMIT = 5
    GRADIENT = 6


_FALLIBLE = frozenset({Part.CALL, Part.ISSUE, Part.WAIT})


@dataclass(slots=True)
class Edges:
    """The edges to one node: the positions at which they begin, and beside each its cause.

    Two may begin at one position, with different causes. A large program has hundreds of thousands of edges: an object
    for each would keep Python's cycle collector busy.
    """

    sources: list[int] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)

    def add(self, source: int, why: Cause) -> None:
        """Add an edge."""
        self.sources.append(source)
        self.causes.append(why)

    def add_all(self, sources: Sequence[int], why: Cause) -> None:
        """Add edges that have one cause."""
        self.sources.extend(sources)
        self.causes.extend([why] * len(sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """For each node, by its position in the program, the positions of the nodes that must come before it."""

    effects: Effects
    edges: list[Edges] = field(repr=False)

    @classmethod
    def of(cls, module: GraphModule) -> Dependencies:
        """Analyse a module's graph, in time proportional to its nodes and edges."""
        effects = Effects.of(module)
        return cls(effects=effects, edges=_Builder(module, effects).build())

    def gathered(self, order: Sequence[int], heads: Mapping[int, int], nodes: Sequence[Node]) -> Dependencies:
        """Return the dependencies after some issues have been merged and all nodes reordered.

        Whatever came before one of the merged issues comes before all of them; otherwise the order is unchanged.

        Args:
            order: all positions in their new order, which keeps the edges; merged issues are adjacent.
            heads: for each merged issue, by position, the last of the issues that it was merged with; others are left
                out.
            nodes: the nodes of the program as it is now, in order.
        """
        left = [position for position in order if heads.get(position, position) == position]
        now = {position: at for at, position in enumerate(left)}
        moved = [now[heads.get(position, position)] for position in range(len(order))]
        edges = [Edges() for _ in left]
        for position in order:
            at = moved[position]
            for source, why in self.before(position):
                if moved[source] != at:
                    edges[at].add(moved[source], why)
        return Dependencies(effects=self.effects.gathered(order, heads, nodes), edges=edges)

    def before(self, position: int) -> Iterable[tuple[int, Cause]]:
        """Return each position that must come before `position`, and why."""
        own = self.edges[position]
        return zip(own.sources, own.causes, strict=True)

    def sources(self, position: int) -> list[int]:
        """Return the positions that must come before `position`; do not modify the result."""
        return self.edges[position].sources


@dataclass(slots=True)
class _Access:
    """The last accesses of a resource: the latest write, and the reads since."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)


class _Builder:
    """One walk over the program that remembers, at each point, the latest access of everything."""

    def __init__(self, module: GraphModule, effects: Effects) -> None:
        self._effects = effects
        self._uses = GradientUses(module, effects)
        self._edges: list[Edges] = []
        self._fence = -1
        self._commit = -1
        self._access: dict[Resource, _Access] = {}
        self._account: dict[Hashable, int] = {}
        self._servers = _ServerWrites()
        self._meets_peers = any(
            node.target in COLLECTIVES or (does.joins and does.part is Part.LOCAL)
            for node, does in zip(effects.nodes, effects.per_node, strict=True)
        )
        self._hazards: list[int] = []
        """Nodes that may fail since the last collective or fence; recorded only if there are collectives."""

    def build(self) -> list[Edges]:
        effects, index = self._effects, self._effects.index
        for position, (node, does) in enumerate(zip(effects.nodes, effects.per_node, strict=True)):
            own = Edges()
            own.add_all([index[value] for value in node.all_input_nodes], Cause.DATA)
            self._edges.append(own)
            if does.part is Part.INPUT:
                continue
            if self._fence >= 0:
                own.add(self._fence, Cause.FENCE)
            if does.part is Part.FENCE:
                self._close(position, own)
                continue
            if does.commits:
                since = max(self._fence, self._commit)
                own.add_all(range(max(since, 0), position), Cause.COMMIT)
                self._commit = position
            elif does.joins:
                own.add_all(self._hazards, Cause.COMMIT)
                self._hazards.clear()
            if does.reads or does.writes:
                self._touch(position, does, own)
            self._use(position, node, own)
            if self._meets_peers and self._may_fail(position):
                self._hazards.append(position)
        return self._edges

    def _may_fail(self, position: int) -> bool:
        """Return whether peers may run the node while it fails in this process: calls, and work that checks values."""
        does, operator = self._effects.per_node[position], self._effects.behaviours[position].operator
        if does.part is Part.LOCAL:
            return operator is None or operator.raises
        return does.part in _FALLIBLE and not is_collective(self._effects.nodes[position])

    def _close(self, position: int, own: Edges) -> None:
        """Put a fence after everything since the last one; from then on it stands for all of that."""
        own.add_all(range(self._fence + 1, position), Cause.FENCE)
        self._fence = position
        self._access.clear()
        self._account.clear()
        self._hazards.clear()
        self._servers = _ServerWrites()

    def _touch(self, position: int, does: NodeEffects, own: Edges) -> None:
        completes = does.part is Part.WAIT  # adds no conflict of its own: whatever conflicts with the call waits for it
        for resource in does.reads:
            if isinstance(resource, ServerState):
                if not completes and (writer := self._servers.last(resource)) >= 0:
                    own.add(writer, Cause.SERVER)
                continue
            access = self._last_to_touch(resource)
            if not completes and access.writer is not None:
                own.add(access.writer, _cause(resource))
            access.readers.append(position)
        for resource in does.writes:
            if isinstance(resource, ServerState):
                if completes and self._servers.latest >= 0:
                    own.add(self._servers.latest, Cause.SERVER)
                self._servers.note(resource, position)
                continue
            access = self._last_to_touch(resource)
            earlier = access.readers if access.writer is None else [access.writer, *access.readers]
            own.add_all([each for each in earlier if each != position], _cause(resource))
            self._access[resource] = _Access(writer=position)

    def _last_to_touch(self, resource: Resource) -> _Access:
        found = self._access.get(resource)
        if found is None:
            self._access[resource] = found = _Access()
        return found

    def _use(self, position: int, node: Node, own: Edges) -> None:
        for account in self._uses.accounts_used(node, self._effects.behaviours[position]):
            last = self._account.get(account, -1)
            if last >= 0 and last != position:
                own.add(last, Cause.SERVER if account == FOLLOWED else Cause.GRADIENT)
            self._account[account] = position


class _ServerWrites:
    """The latest write that may conflict with a read of a server's state.

    Writes and the waits for them keep their order, so the latest one stands for all before it.
    """

    def __init__(self) -> None:
        self.latest = -1
        self._by_state: dict[ServerState, int] = {}
        self._by_server: dict[str | None, int] = {}
        self._by_name: dict[str | None, int] = {}

    def note(self, state: ServerState, position: int) -> None:
        self.latest = self._by_state[state] = position
        self._by_server[state.server] = self._by_name[state.name] = position

    def last(self, state: ServerState) -> int:
        """Return the position of the latest write that may have changed the state; -1 if there is none."""
        server, name = state.server, state.name
        if server is None and name is None:
            return self.latest
        if server is None:
            return max(self._by_name.get(name, -1), self._by_name.get(None, -1))
        if name is None:
            return max(self._by_server.get(server, -1), self._by_server.get(None, -1))
        either = (state, ServerState(server), ServerState(None, name), ServerState())
        return max(self._by_state.get(each, -1) for each in either)


def _cause(resource: Resource) -> Cause:
    if isinstance(resource, (Process, Peers, Reductions)):
        return Cause.SERVER
    return Cause.RANDOM if isinstance(resource, Generator) else Cause.MEMORY
