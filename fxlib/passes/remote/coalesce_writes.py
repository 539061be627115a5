"""Send writes to one server, and reads between them, in one message that runs them in program order.

A blocking program sends a write only once everything before it has succeeded. Consecutive writes to one server may
share a message nevertheless: the server stops at the first failure, so the second write happens if and only if the
first succeeded. Whatever is between them in the program must then end before the first is sent, so none of it may need
the first one's result or effect, unless it is a read that travels with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.cost.costs import CallCost, Costs
from fxlib.analysis.effects.dependencies import Cause, Dependencies
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import contract_of_call
from fxlib.analysis.scheduling.batching import Capacity, is_plain_call, kind_of_message, together_s
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.introduced import Introduced
from fxlib.passes.remote.coalesce_calls import coalesce
from fxlib.runtime.ops.batches import IN_ORDER
from fxlib.runtime.ops.registry import Role


@register_pass(
    "coalesce_writes", preserves="bitwise", introduces=Introduced.with_roles(Role.ISSUE, Role.WAIT), version="3"
)
class CoalesceWrites(GraphPass):
    """Issue consecutive writes to one server together; the server stops at the first failure, as the program would.

    Each write keeps a wait, a result and an error of its own. The pass works on calls that are split.
    """

    max_calls: int = 64
    """Maximum number of calls in one message."""
    batch_bytes: int = 1 << 20
    """Maximum bytes of one message, requests and answers together, as far as a profile has them."""

    def __post_init__(self) -> None:
        """Reject limits that nothing could meet."""
        self.require_at_least(max_calls=1, batch_bytes=0)

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        nodes = list(module.graph.nodes)
        if sum(map(may_write_in_turn, nodes)) < 2:
            return PassResult(module, changes=0)
        capacity = Capacity(calls=self.max_calls, bytes=self.batch_bytes)
        found = list(sequences(context.get(Dependencies), context.costs(), capacity))
        for positions in found:
            gather([nodes[position] for position in positions])
        return PassResult(module, changes=sum(map(len, found)))


def gather(issues: Sequence[Node]) -> None:
    """Replace issues by one batch at the last of them; their waits follow it."""
    waits = [next(iter(issue.users)) for issue in issues]
    previous = coalesce(issues, IN_ORDER)
    for wait in waits:
        previous.append(wait)
        previous = wait


_KEPT = frozenset({Cause.SERVER, Cause.COMMIT, Cause.GRADIENT})
"""Orders between two calls that one message keeps."""


def may_write_in_turn(issue: Node) -> bool:
    """Whether the call writes, and its contract lets it share a message."""
    contract = contract_of_call(issue)
    return contract is not None and contract.batchable and not contract.is_read and is_plain_call(issue)


def sequences(dependencies: Dependencies, costs: Costs, capacity: Capacity) -> Iterator[tuple[int, ...]]:
    """Yield the positions of issues to merge, at least two each time, in time linear in nodes and edges.

    The first and the last of each are writes. Calls stay separate if the first would be answered while the trainer does
    the work between them, or if a limit is reached.
    """
    program = _Program(dependencies=dependencies, costs=costs, capacity=capacity)
    group = _Group(program)
    for position, node in enumerate(dependencies.effects.nodes):
        if dependencies.effects.per_node[position].part is Part.ISSUE and _may_join(node):
            if not group.takes(position, node):
                yield from group.found()
                group = _Group(program)
            if group.positions or may_write_in_turn(node):
                group.add(position, node)
        elif group.positions:
            group.pass_by(position, node)
    yield from group.found()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """The facts about the program that the walk uses."""

    dependencies: Dependencies
    costs: Costs
    capacity: Capacity


class _Group:
    """Calls that travel together, as far as the walk has come. Times are in seconds from the first issue."""

    def __init__(self, program: _Program) -> None:
        self._program = program
        self.positions: list[int] = []
        self._calls: list[CallCost] = []
        self._kind: Hashable = None
        self._until = 0
        """Number of the calls up to the last write."""
        self._own: set[int] = set()
        """Positions of the calls and of their waits."""
        self._waits: set[Node] = set()
        self._after: set[int] = set()
        """Nodes that come after one of the calls and are not among them."""
        self._work_s = 0.0
        self._separate_s = 0.0
        """Time at which the calls would end if each were sent as soon as the program reaches it."""

    def takes(self, position: int, node: Node) -> bool:
        """Return whether one more call may and should travel with the others."""
        if kind_of_message(node) != self._kind or len(self.positions) >= self._program.capacity.calls:
            return False
        if self._after and may_write_in_turn(node):
            return False  # the message would leave here, and earlier work must follow its answers
        for source, why in self._program.dependencies.before(position):
            if source in self._after or (source in self._own and why not in _KEPT):
                return False
        if not may_write_in_turn(node) and self._own.isdisjoint(self._program.dependencies.sources(position)):
            return False  # a read that need not wait for the writes stays separate
        return self._pays([*self._calls, self._cost(node)])

    def add(self, position: int, node: Node) -> None:
        """Add a call that travels with the others."""
        call = self._cost(node)
        self._separate_s = self._alone_s(call)
        self._kind = kind_of_message(node)
        self._calls.append(call)
        self.positions.append(position)
        self._own.add(position)
        self._waits.update(node.users)
        if may_write_in_turn(node):
            self._until = len(self.positions)

    def pass_by(self, position: int, node: Node) -> None:
        """Record how another node depends on the calls."""
        if node in self._waits:
            self._own.add(position)
            return
        self._work_s += self._program.costs.seconds.get(node, 0.0)
        if any(source in self._own or source in self._after for source in self._program.dependencies.sources(position)):
            self._after.add(position)

    def found(self) -> Iterator[tuple[int, ...]]:
        """Yield the calls if there are several; reads after the last write stay separate, in parallel."""
        if self._until > 1:
            yield tuple(self.positions[: self._until])

    def _pays(self, calls: Sequence[CallCost]) -> bool:
        costs, last = self._program.costs, calls[-1]
        carried = sum(each.request_bytes + each.response_bytes for each in calls) if costs.measured else 0
        over_s = self._work_s + together_s(calls, costs.servers[last.to], in_turn=True)
        return carried <= self._program.capacity.bytes and over_s <= self._alone_s(last)

    def _alone_s(self, call: CallCost) -> float:
        return max(self._separate_s, self._work_s) + call.issue_s + call.service_s + call.wait_s

    def _cost(self, node: Node) -> CallCost:
        return self._program.costs.messages[node].calls[0]


def _may_join(issue: Node) -> bool:
    contract = contract_of_call(issue)
    return contract is not None and contract.batchable and is_plain_call(issue)
