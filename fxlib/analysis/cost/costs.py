"""What each node, call and server of one program costs, in seconds and bytes: from its profile, else by estimate.

Nodes of a rewritten graph are those of the captured one by name, and calls by the name that both of their halves carry.
What a pass made anew, and what the profile does not hold, is estimated (`fxlib.analysis.cost.estimates`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule, Node

from fxlib.analysis.cost import estimates
from fxlib.analysis.effects.resources import contract_of_call, function_name, speaks_to
from fxlib.runtime import functions
from fxlib.runtime.ops.batches import is_batch, is_item, item_of, waits_of
from fxlib.runtime.ops.calls import is_call, is_issue, is_wait
from fxlib.runtime.ops.record import call_name
from fxlib.spec.contract import Contract
from fxlib.spec.profile import CallProfile, Profile, Push, ServerProfile

INTAKE_SHARE = 0.5
"""Share of a round trip that is work for one message at a time, where that was not measured."""
ITEM_INTAKE_SHARE = 0.25
"""Work that each further call of a batch adds to the RPC layer's, as a share of that on a single call."""
ITEM_S = 1e-5
"""Seconds that each further call adds to a batch's issue on the trainer's thread, and to its wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """One remote call, nothing else in flight. See `fxlib.spec.profile.CallProfile`."""

    call: str
    function: str
    to: str
    issue_s: float
    wait_s: float
    service_s: float
    """Seconds from the end of the issue to the arrival of the answer."""
    request_bytes: int
    response_bytes: int
    wake_s: float = 0.0
    """Seconds that a wait takes longer where it blocks."""
    contract: Contract | None = None
    push: Push | None = None
    guessed: bool = False
    """Whether no profile says what it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What travels at once: one call, or the calls of a batch."""

    calls: tuple[CallCost, ...]
    to: str
    issue_s: float
    request_bytes: int
    response_bytes: int
    work_s: float
    """Seconds on the server, from the request's arrival to the answer's departure, a worker free at once."""
    latency_s: float
    """Seconds on the way there and back, side by side with other messages."""
    intake_s: float
    """Work of the RPC layer, for one message at a time: see `fxlib.spec.profile.ServerProfile.per_call_s`."""
    transfer_s: float
    """Seconds that request and answer take on free links."""

    @property
    def service_s(self) -> float:
        """From the end of the issue to the arrival of the answer, nothing else in flight."""
        return self.transfer_s + self.latency_s + self.work_s + self.intake_s

    @property
    def guessed(self) -> bool:
        """Whether no profile says when its answer comes."""
        return any(call.guessed for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of one graph."""

    seconds: dict[Node, float] = field(repr=False)
    """Seconds of each node's work on the trainer's thread, without the time for which it blocks."""
    value_bytes: dict[Node, int] = field(repr=False)
    """Bytes of each value's own memory; a result's are those of its wait."""
    views: set[Node] = field(repr=False)
    """Values in the memory of their first input."""
    messages: dict[Node, Message] = field(repr=False)
    """Messages by the nodes that send them: issues, and calls in their blocking form."""
    results: dict[Node, CallCost] = field(repr=False)
    """The call whose result each wait, or blocking call, returns."""
    servers: Mapping[str, ServerProfile]
    loss_s: float
    backward_s: float
    rest_s: float
    measured: bool
    """Whether there is a profile."""

    @classmethod
    def of(cls, module: GraphModule, profile: Profile | None) -> Costs:
        """Look a module's nodes up in a profile, or estimate them; in linear time."""
        return _Ledger(module, profile or Profile(), measured=profile is not None).costs()


class _Ledger:
    """One walk over a graph."""

    def __init__(self, module: GraphModule, profile: Profile, *, measured: bool) -> None:
        self._module = module
        self._profile = profile
        self._measured = measured
        self._estimator = estimates.Estimator(module)
        self._servers = dict(profile.server_by_name)
        self._seconds: dict[Node, float] = {}
        self._bytes: dict[Node, int] = {}
        self._messages: dict[Node, Message] = {}
        self._results: dict[Node, CallCost] = {}

    def costs(self) -> Costs:
        known = self._profile.node_by_name
        seconds, sizes, views = self._seconds, self._bytes, set()
        estimate, is_view = self._estimator.seconds, self._estimator.is_view
        for node in self._module.graph.nodes:
            if node.op in _FREE or node.target is functions.resolve:
                seconds[node], sizes[node] = 0.0, 0
            elif is_call(node) or is_issue(node):
                self._send(node)
            elif is_wait(node):
                seconds.setdefault(node, estimates.WAIT_S)
                sizes.setdefault(node, 0)
            else:
                found = known.get(node.name)
                seconds[node] = estimate(node) if found is None else found.seconds
                if is_view(node):
                    views.add(node)
                    sizes[node] = 0
                else:
                    sizes[node] = estimates.value_bytes(node) if found is None else found.output_bytes
        return Costs(
            seconds=seconds,
            value_bytes=sizes,
            views=views,
            messages=self._messages,
            results=self._results,
            servers=self._servers,
            loss_s=self._profile.loss_s,
            backward_s=self._profile.backward_s,
            rest_s=self._profile.rest_s,
            measured=self._measured,
        )

    def _send(self, node: Node) -> None:
        waits = (waits_of(node) if is_batch(node) else None) or (node,)
        calls = tuple(self._call(each) for each in waits)
        serial = is_batch(node) and len(node.args) > 3 and node.args[3] is not None
        servers = [self.server(call.to) for call in calls]  # of which a profile of another graph may know several
        message = message_of(calls, servers[0], serial=serial)
        self._messages[node] = message
        self._seconds[node], self._bytes[node] = message.issue_s, 0
        if is_call(node):
            self._join(node, calls[0], calls[0].wait_s)
            return
        for user in filter(is_wait, node.users):
            index = user.args[1] if is_item(user) else 0
            call = calls[index if isinstance(index, int) and index < len(calls) else 0]
            self._join(user, call, call.wait_s if call is calls[0] else min(call.wait_s, ITEM_S))

    def _join(self, node: Node, call: CallCost, wait_s: float) -> None:
        self._results[node] = call
        self._seconds[node] = self._seconds.get(node, 0.0) + wait_s
        self._bytes[node] = call.response_bytes

    def _call(self, node: Node) -> CallCost:
        """Return what is known of one call: by its blocking form, its issue, or its wait in a batch."""
        name = call_name(node)
        known = self._profile.call_by_name.get(name)
        carrier = node.all_input_nodes[0] if is_item(node) else node
        function = item_of(node).function if is_item(node) else function_name(node)
        to = known.to if known is not None else speaks_to(carrier)
        cost = _measured(known) if known is not None else _estimated(name, function, to)
        contract = contract_of_call(node if "contract" in node.meta else carrier)
        return replace(cost, call=name, function=function, to=to, contract=contract)

    def server(self, name: str) -> ServerProfile:
        if name not in self._servers:
            self._servers[name] = estimates.server(name)
        return self._servers[name]


def issue_of(node: Node) -> Node:
    """Return what sent the call whose result a node returns: the node itself where it is a blocking call."""
    return node.all_input_nodes[0] if is_wait(node) else node


def message_of(calls: tuple[CallCost, ...], server: ServerProfile, *, serial: bool) -> Message:
    """Return what calls to one server cost as one message; `serial`: the server works them off one after another."""
    alone = [work_s(call, server) for call in calls]
    sent, returned = sum(call.request_bytes for call in calls), sum(call.response_bytes for call in calls)
    first_s = max(_intake_s(call, server) for call in calls)
    work = batch_work_s(alone, server, serial=serial)
    further_s = min(ITEM_INTAKE_SHARE * first_s * (len(calls) - 1), max(work - max(alone), 0.0))
    return Message(
        calls=calls,
        to=calls[0].to,
        issue_s=max(call.issue_s for call in calls) + ITEM_S * (len(calls) - 1),
        request_bytes=sent,
        response_bytes=returned,
        work_s=work - further_s,
        latency_s=max(max(_overhead_s(call, server) for call in calls) - first_s, 0.0),
        intake_s=first_s + further_s,
        transfer_s=(sent + returned) / server.bytes_per_s,
    )


def work_s(call: CallCost, server: ServerProfile) -> float:
    """Return the part of a call's service that is the server's work on it."""
    return max(call.service_s - transfer_s(call, server) - _overhead_s(call, server), 0.0)


def _overhead_s(call: CallCost, server: ServerProfile) -> float:
    """Return the part of a call's service that is neither work nor transfer. A round trip begins with an issue."""
    least_s = max(server.round_trip_s - call.issue_s, 0.0)
    return min(max(least_s, _intake_s(call, server)), max(call.service_s - transfer_s(call, server), 0.0))


def _intake_s(call: CallCost, server: ServerProfile) -> float:
    intake_s = INTAKE_SHARE * server.round_trip_s if server.per_call_s is None else server.per_call_s
    return min(intake_s, max(call.service_s - transfer_s(call, server), 0.0))


def transfer_s(call: CallCost, server: ServerProfile) -> float:
    """Return the part of a call's service that its bytes spend on the links."""
    return (call.request_bytes + call.response_bytes) / server.bytes_per_s


def batch_work_s(alone_s: list[float], server: ServerProfile, *, serial: bool) -> float:
    """Return how long a server works on a batch of calls, each of which would take it so long alone.

    A declared batched form works them off one after another, the generic batch runs them side by side. What a further
    call adds was measured; or else it is its own time, or the server's workers share them.
    """
    if len(alone_s) == 1:
        return alone_s[0]
    further_s = server.per_turn_s if serial else server.per_item_s
    if further_s is not None:
        return max(alone_s) + further_s * (len(alone_s) - 1)
    return sum(alone_s) if serial else max(*alone_s, sum(alone_s) / server.concurrency)


_FREE = frozenset({"placeholder", "get_attr", "output"})


def _measured(call: CallProfile) -> CallCost:
    return CallCost(
        call=call.call,
        function=call.function,
        to=call.to,
        issue_s=call.issue_s,
        wait_s=call.wait_s,
        service_s=call.service_s.median,
        request_bytes=call.request_bytes,
        response_bytes=call.response_bytes,
        wake_s=call.wake_s,
        push=call.push,
    )


def _estimated(call: str, function: str, to: str) -> CallCost:
    return CallCost(
        call=call,
        function=function,
        to=to,
        issue_s=estimates.ISSUE_S,
        wait_s=estimates.WAIT_S,
        service_s=estimates.SERVICE_S,
        request_bytes=estimates.VALUE_BYTES,
        response_bytes=estimates.VALUE_BYTES,
        guessed=True,
    )
