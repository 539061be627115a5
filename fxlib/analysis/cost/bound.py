"""The length of a step that no schedule of a program can beat, according to the cost model.

Each term is less than or equal to the length of every step that `cost.simulate` makes of any legal order of
the program, its calls sent singly or coalesced:

- *compute*: the trainer's thread does all local work itself. It issues at least one message to each destination for the
  calls that may be coalesced, and one for each other call. A message takes its issue and a wait.
- *critical path*: a legal order respects every dependency, so the forward lasts as long as the longest chain of them,
  in which a call takes its issue, its undisturbed service, and its wait. Coalescing shortens such chains, so the issue
  of a call that may share a message counts only on the way to its own answer, and a call that may travel in the message
  of an earlier call does not wait for that call's answer. Loss, backward, the rest and the pushes follow; the pushes
  take at least the issue and the service of the longest, and the work that all of them together make for a server.
- *server*: a server's workers share its work evenly at best. Each call takes at least the work that it adds to a batch,
  less what the batch moves from the server to the RPC layer, and a batch takes at least as long as the longest of its
  calls. Where nothing could be repeated on a server to see how many calls it works on at once, that may be all of them.
- *transfer*: each link carries all bytes that cross it, one after another.

In a loop under `fxlib.pipeline`, servers and links work in parallel with the trainer, so their terms are just their
work for one step. The critical path reduces to the chain of *conflicts*: a read of rows that a push changes comes after
that push, unless the trainer can make the push's update itself, and the push comes after backward; and a read that runs
ahead leaves no more steps before its own than the pipeline is deep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.cost.costs import ITEM_INTAKE_SHARE, CallCost, Costs, Loop, intake_s, issue_of, work_s
from fxlib.analysis.cost.simulate import gradients
from fxlib.analysis.effects.dependencies import Cause, Dependencies
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.prologue import CallAhead, Way
from fxlib.analysis.effects.resources import ServerState
from fxlib.spec.profile import Profile, Push, ServerProfile, Spread
from fxlib.spec.report import Span, Timeline

_IN_TURN = frozenset({Cause.SERVER, Cause.COMMIT})
"""Causes for which a node must come after a call's answer, unless one message carries both in program order."""
_AT_ISSUE = frozenset({Cause.GRADIENT, Cause.RANDOM})
"""Causes for which a node must come after a blocking call's issue, but not after its answer."""
_HALVINGS = 16
"""Number of times to halve the interval that contains the length of a chain that depends on the length of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The bound and its terms, each a bound on its own, in seconds per step."""

    step_s: float
    compute_s: float
    critical_path_s: float
    server_s: float
    transfer_s: float
    limiting: str
    """The largest term: "compute", "critical path", "server" or "transfer"; in a loop under a pipeline, "conflicts"
    replaces the critical path."""
    timeline: Timeline = field(repr=False)
    """A step of that length, for display: the calls of the critical path in flight, and the work on the thread."""


def bound(module: GraphModule, profile: Profile | None, *, typical: bool = False) -> Bound:
    """Bound the step of a module, captured or with its calls split, by the profile of the program.

    Nodes and edges are visited once. Each part counts with its shortest measured time or, if `typical`, with its
    typical one: then the result bounds what `fxlib.analysis.cost.simulate.predict` gives for the program's legal
    orders.
    """
    costs = Costs.of(module, profile if profile is None or typical else fastest(profile))
    dependencies = Dependencies.of(module)
    return _Terms(dependencies, costs).bound()


def bound_pipelined(module: GraphModule, profile: Profile | None, loop: Loop) -> Bound:
    """Bound the steady step of a loop under `fxlib.pipeline`, as `bound` does for a single step."""
    costs = Costs.of(module, None if profile is None else fastest(profile))
    return _PipelinedTerms(Dependencies.of(module), costs, loop.reads(module), loop).bound()


def fastest(profile: Profile) -> Profile:
    """Return a profile in which everything takes the shortest measured time."""
    share = profile.least_share

    def least(push: Push | None) -> Push | None:
        if push is None:
            return None
        return replace(
            push,
            ready_s=push.ready_s * share,
            issue_s=push.issue_s * share,
            service_s=Spread.of([push.service_s.least]),
        )

    return replace(
        profile,
        calls=tuple(
            replace(
                call,
                issue_s=call.issue_s * share,
                wait_s=call.wait_s * share,
                wake_s=0.0,
                service_s=Spread.of([call.service_s.least]),
                push=least(call.push),
            )
            for call in profile.calls
        ),
        nodes=tuple(replace(node, seconds=node.seconds * share) for node in profile.nodes),
        loss_s=profile.loss_s * share,
        backward_s=profile.backward_s * share,
        rest_s=profile.rest_s * share,
    )


class _Terms:
    """The data that all terms are computed from."""

    path = "critical path"

    def __init__(self, dependencies: Dependencies, costs: Costs) -> None:
        self._dependencies = dependencies
        self._costs = costs
        self._nodes = dependencies.effects.nodes
        joined = (message for node, message in costs.messages.items() if self._is_joined(node))
        self._calls = [(message.to, call) for message in joined for call in message.calls]
        contracts = ((call.to, call.contract) for call in costs.results.values())
        self._tried = {to for to, contract in contracts if contract is not None and contract.is_read}
        """Servers on which calls may have been repeated to see how many they work on at once: reads alone are."""
        self._pushes = gradients(self._nodes, costs)
        self._after_s = costs.loss_s + costs.backward_s + costs.rest_s
        self._work_s = sum(costs.seconds[node] for node in self._nodes if not self._is_call(node))

    def bound(self) -> Bound:
        """Return the bound."""
        terms = {
            "compute": self._compute_s(),
            self.path: self._critical_path_s(),
            "server": self._server_s(),
            "transfer": self._transfer_s(),
        }
        limiting = max(terms, key=terms.__getitem__)
        return Bound(
            step_s=terms[limiting],
            compute_s=terms["compute"],
            critical_path_s=terms[self.path],
            server_s=terms["server"],
            transfer_s=terms["transfer"],
            limiting=limiting,
            timeline=self._timeline(terms[limiting]),
        )

    def _is_call(self, node: Node) -> bool:
        return node in self._costs.messages or node in self._costs.results

    def _compute_s(self) -> float:
        handling_s = sum(sum(each) for each in self._fewest(self._handling_s).values())
        pushes_s = sum(max(issues) for issues in self._push_issues().values())
        return self._work_s + handling_s + self._after_s + pushes_s

    def _handling_s(self, call: CallCost) -> float:
        """Return how long the trainer's thread is busy with a call that travels alone."""
        return call.issue_s + call.wait_s

    def _critical_path_s(self) -> float:
        """Return the longest path through the dependencies, and what must come after it."""
        return self._forward_s() + self._after_s + self._pushes_s()

    def _pushes_s(self) -> float:
        """Return how long the pushes take at least, from the end of backward to the last answer."""
        longest_s = max((each.push.issue_s + each.push.service_s.median for each in self._pushes), default=0.0)
        by_destination: dict[str, list[CallCost]] = {}
        for each in self._pushes:
            by_destination.setdefault(each.cost.to, []).append(each.cost)
        busy = (self._work_of(to, calls) + min(call.issue_s for call in calls) for to, calls in by_destination.items())
        return max((longest_s, *busy))

    def _forward_s(self) -> float:
        """Return the longest path through the forward."""
        effects = self._dependencies.effects
        issued: list[float] = []
        ends: list[float] = []
        sent: list[float] = []
        """Time of the issue of the call that a node makes, issues or waits for, in seconds."""
        for position, node in enumerate(self._nodes):
            start = 0.0
            for source, why in self._dependencies.before(position):
                if why in _IN_TURN and self._may_follow(node, self._nodes[source]):
                    start = max(start, sent[source])
                else:
                    start = max(start, (ends if self._needs_answer(position, source, why) else issued)[source])
            out_s = start + self._issue_s(node)
            issued.append(start if self._shares_issue(node) else out_s)
            ends.append(self._answered_s(node, out_s))
            is_wait = effects.per_node[position].part is Part.WAIT
            sent.append(sent[effects.index[issue_of(node)]] if is_wait else issued[-1])
        return max(
            (end if self._is_joined(node) else out for node, out, end in zip(self._nodes, issued, ends, strict=True)),
            default=0.0,
        )

    def _needs_answer(self, position: int, source: int, why: Cause) -> bool:
        """Return whether a node must come after the answer to a call before it, and not just after the call's issue."""
        node, other, per_node = self._nodes[position], self._nodes[source], self._dependencies.effects.per_node
        if other not in self._costs.results:
            return per_node[position].part is Part.WAIT and issue_of(node) is other
        if why is Cause.SERVER and per_node[source].part is Part.CALL:
            # Only a write on a server ends with its answer; what else orders calls, such as their peers, ends before.
            is_write = any(isinstance(each, ServerState) for each in per_node[source].writes)
            return is_write and per_node[position].part is not Part.LOCAL
        return why not in _AT_ISSUE

    def _may_follow(self, node: Node, other: Node) -> bool:
        """Return whether a call may share the message of an earlier one, and so need not wait for its answer."""
        message = self._costs.messages.get(node)
        earlier = self._costs.messages.get(issue_of(other)) if other in self._costs.results else None
        if message is None or earlier is None or message.to != earlier.to:
            return False
        return all(map(_may_coalesce, (*message.calls, *earlier.calls)))

    def _is_joined(self, node: Node) -> bool:
        """Return whether something waits for what the node sends, so that the forward lasts until the answer."""
        return node not in self._costs.messages or any(user in self._costs.results for user in (node, *node.users))

    def _shares_issue(self, node: Node) -> bool:
        """Return whether the node issues a call that may travel in another issue's message, at no cost of its own."""
        message = self._costs.messages.get(node)
        return message is not None and all(map(_may_coalesce, message.calls))

    def _issue_s(self, node: Node) -> float:
        """Return how long a node takes until whatever does not need its answer can follow."""
        message = self._costs.messages.get(node)
        if message is not None:
            return min(call.issue_s for call in message.calls)
        return 0.0 if node in self._costs.results else self._costs.seconds[node]

    def _answered_s(self, node: Node, issued_s: float) -> float:
        """Return when a node has its answer: its cheapest call's service later at least; for a wait, the wait."""
        message = self._costs.messages.get(node)
        service_s = 0.0 if message is None else min(call.service_s for call in message.calls)
        return issued_s + service_s + self._join_s(node)

    def _join_s(self, node: Node) -> float:
        """Return how long the trainer's thread takes over an answer that is there, if the node returns it."""
        call = self._costs.results.get(node)
        return 0.0 if call is None else min(call.wait_s, self._costs.seconds[node])

    def _server_s(self) -> float:
        """Return the longest time that one server is busy with the step, and what must come after it."""
        busy = [0.0]
        for to, calls in self._by_destination().items():
            longest_s = max(work_s(call, self._costs.servers[to]) for call in calls)
            busy.append(max(longest_s, self._work_of(to, calls)) + min(call.issue_s for call in calls))
        return max(busy) + self._after_s

    def _work_of(self, to: str, calls: Sequence[CallCost]) -> float:
        """Return how long a server is busy with calls at least, with all of its workers in parallel."""
        server = self._costs.servers[to]
        if server.concurrency == 1 and to not in self._tried:
            return max(work_s(call, server) for call in calls)
        together = [call for call in calls if _may_coalesce(call)]
        if len(together) < 2:
            return sum(work_s(call, server) for call in calls) / server.concurrency
        alone_s = sum(work_s(call, server) for call in calls if not _may_coalesce(call))
        return (alone_s + max(self._work_together(together, server), 0.0)) / server.concurrency

    def _work_together(self, calls: Sequence[CallCost], server: ServerProfile) -> float:
        """Return the least work of calls that may share messages: each alone, in turn, or side by side with others.

        Where it was not measured what a further call adds, a batch may move more work to the RPC layer than one of its
        calls has, at the expense of the others; so the least work of a call may be negative.
        """
        moved_s = ITEM_INTAKE_SHARE * max(intake_s(call, server) for call in calls)
        total_s = 0.0
        for call in calls:
            alone_s = work_s(call, server)
            in_turn_s = alone_s - moved_s if server.per_turn_s is None else max(server.per_turn_s - moved_s, 0.0)
            ways = [alone_s, in_turn_s]
            if call.contract is not None and call.contract.batchable:
                side_s = server.per_item_s
                ways.append(alone_s / server.concurrency - moved_s if side_s is None else max(side_s - moved_s, 0.0))
            total_s += min(ways)
        return total_s

    def _added_s(self, call: CallCost) -> float:
        """Return the least that a call adds to its server's work on a batch."""
        server = self._costs.servers[call.to]
        further = (each for each in (server.per_item_s, server.per_turn_s) if each is not None)
        return min((work_s(call, server), *further))

    def _transfer_s(self) -> float:
        """Return how long the links carry the bytes that the step sends and receives."""
        return self._carried_s(self._by_destination()) + self._after_s

    def _carried_s(self, by_destination: Mapping[str, Sequence[CallCost]]) -> float:
        servers = self._costs.servers
        best = max((server.bytes_per_s for server in servers.values()), default=1.0)
        ways = [0.0]
        for direction in ("request_bytes", "response_bytes"):
            total_s = 0.0
            for to, calls in by_destination.items():
                # No call's bytes are on the way for longer than the call takes, however slow its link was measured to
                # be.
                sizes = [(getattr(call, direction), call.service_s) for call in calls]
                ways.append(sum(min(size / servers[to].bytes_per_s, least_s) for size, least_s in sizes))
                total_s += sum(min(size / best, least_s) for size, least_s in sizes)
            ways.append(total_s)
        return max(ways)

    def _by_destination(self) -> dict[str, list[CallCost]]:
        found: dict[str, list[CallCost]] = {}
        for to, call in self._calls:
            found.setdefault(to, []).append(call)
        return found

    def _fewest(self, cost: Callable[[CallCost], float]) -> dict[str, list[float]]:
        """Return the cost of the fewest possible messages, by destination: one for all calls that may be coalesced."""
        found: dict[str, list[float]] = {}
        for to, calls in self._by_destination().items():
            together = [cost(call) for call in calls if _may_coalesce(call)]
            found[to] = [
                *([max(together)] if together else []),
                *(cost(each) for each in calls if not _may_coalesce(each)),
            ]
        return found

    def _push_issues(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for each in self._pushes:
            found.setdefault(each.call.to, []).append(each.push.issue_s)
        return found

    def _timeline(self, step_s: float) -> Timeline:
        """Draw a step of that length: its phases from the end backwards, and every call as early as possible."""
        costs = self._costs
        spans = [
            Span(kind="in_flight", name=call.call, to=to, start_s=0.0, end_s=min(call.service_s, step_s))
            for to, call in self._calls
        ]
        end = step_s
        for kind, seconds in (("optimizer", costs.rest_s), ("backward", costs.backward_s), ("loss", costs.loss_s)):
            if seconds:
                spans.append(Span(kind=kind, name="", to="", start_s=end - seconds, end_s=end))
            end -= seconds
        spans.append(Span(kind="forward", name="", to="", start_s=0.0, end_s=end))
        return Timeline(spans=tuple(sorted(spans, key=lambda span: span.start_s)), step_s=step_s)


class _PipelinedTerms(_Terms):
    """The same terms for a loop whose reads run ahead of their step."""

    path = "conflicts"

    def __init__(
        self,
        dependencies: Dependencies,
        costs: Costs,
        ahead: Mapping[Node, CallAhead],
        loop: Loop,
    ) -> None:
        super().__init__(dependencies, costs)
        self._ahead, self._depth, self._loop = ahead, loop.depth, loop
        self._step_s = math.inf
        """Length of the steps that a read has before its own, in seconds."""
        behind = (costs.messages[node] for node, each in ahead.items() if each.way is not Way.NOTHING_WRITTEN)
        self._riding = {call.call for message in behind for call in message.calls if _may_coalesce(call)}
        """The calls that may travel in a push's message."""

    @override
    def _handling_s(self, call: CallCost) -> float:
        return call.wait_s if call.call in self._riding else super()._handling_s(call)

    @override
    def _critical_path_s(self) -> float:
        """Return the shortest step that is as long as its chain: the longer steps are, the earlier reads leave."""
        shortest_s = super()._critical_path_s()
        self._step_s = 0.0
        longest_s = super()._critical_path_s()
        for _ in range(_HALVINGS if shortest_s < longest_s else 0):
            self._step_s = (shortest_s + longest_s) / 2
            if super()._critical_path_s() > self._step_s:
                shortest_s = self._step_s
            else:
                longest_s = self._step_s
        return shortest_s

    @override
    def _issue_s(self, node: Node) -> float:
        return 0.0 if node in self._ahead else super()._issue_s(node)

    @override
    def _answered_s(self, node: Node, issued_s: float) -> float:
        """Return when a node has its answer; what is left of a read that ran ahead passes from the step's start on."""
        ahead = self._ahead.get(node)
        if ahead is None:
            return super()._answered_s(node, issued_s)
        left_s = min(self._left_s(call, ahead.way) for call in self._costs.messages[node].calls)
        return max(issued_s, left_s) + self._join_s(node)

    def _left_s(self, call: CallCost, way: Way | None) -> float:
        """Return how long after the last push a read is answered: behind that, it is made of what this changes."""
        share = 0.0 if way is Way.NOTHING_WRITTEN else self._loop.changed(call.call, call.contract)
        again_s = share * min(self._added_s(call), call.service_s)
        return max(call.service_s - self._depth * self._step_s, again_s, 0.0)

    @override
    def _server_s(self) -> float:
        return max((self._work_of(to, calls) for to, calls in self._with_pushes().items()), default=0.0)

    @override
    def _transfer_s(self) -> float:
        return self._carried_s(self._with_pushes())

    def _with_pushes(self) -> dict[str, list[CallCost]]:
        found = self._by_destination()
        for each in self._pushes:
            found.setdefault(each.call.to, []).append(each.cost)
        return found


def _may_coalesce(call: CallCost) -> bool:
    """Return whether the contract lets the call travel with others, whatever the program."""
    contract = call.contract
    return contract is not None and (contract.batchable or (contract.is_read and contract.batched_by is not None))
