"""The cost of each node, call and server of one program, in seconds and bytes: from its profile, or estimated.

Nodes of a rewritten graph match the captured ones by name, and calls match by the name that both of their halves carry.
Nodes that a pass created, and those that the profile lacks, are estimated by round figures, so that a plan is the same
everywhere. The figures have the order of magnitude of a CPU trainer and a server on its own network, and serve to
decide what comes first; a step's length in seconds is only predicted from a profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxlib.analysis.effects.prologue import CallAhead, Way, may_run_ahead
from fxlib.analysis.effects.resources import contract_of_call, function_name, speaks_to
from fxlib.analysis.operators import operator_tables
from fxlib.runtime import functions
from fxlib.runtime.ops.calls import is_call, is_issue, is_wait
from fxlib.runtime.ops.registry import TRACKERS, batched_by_of, is_batch, is_item, item_of, waits_of
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.contract import Contract
from fxlib.spec.profile import CallProfile, Profile, Push, ServerProfile

INTAKE_SHARE = 0.5
"""Share of a round trip that is work for one message at a time, if that was not measured."""
ITEM_INTAKE_SHARE = 0.25
"""Work that each further call of a batch adds to the RPC layer's, as a share of its work on a single call."""
ITEM_S = 1e-5
"""Seconds that each further call adds to a batch's issue on the trainer's thread, and to its wait."""

_VIEW_S = 1e-6
"""Seconds of an operator that makes no new memory, or only inspects a tensor."""
_OPERATOR_S = 5e-6
"""Seconds of any operator before it touches an element."""
_ELEMENTS_PER_S = 1e9
_PRODUCT_S = 1e-4
"""Seconds of a matrix product of unknown size, a convolution, or attention."""
_FLOPS_PER_S = 2e10
_ROWS = 64
"""Batch size of a linear layer's input if it is unknown."""
_VALUE_BYTES = 16 * 1024
"""Bytes of a value of unknown size."""
_ISSUE_S = 1e-4
_WAIT_S = 2e-5
_SERVICE_S = 4e-4
"""Seconds from a call's issue to the arrival of its answer."""

_VIEWS = operator_tables.NEW_VIEW | {"getitem", "getattr", "size", "dim", "numel", "flatten", "contiguous", "to"}
_PRODUCTS = frozenset(
    {
        *("linear", "bilinear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "einsum", "tensordot"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm", "gru"),
        *("scaled_dot_product_attention", "multi_head_attention_forward", "rnn_tanh"),
    }
)
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten)
_HEAVY_MODULES = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The loop under `fxlib.pipeline` that a step belongs to."""

    depth: int
    """Number of batches that are pulled before their step."""
    conflicts: Mapping[str, float] = field(default_factory=dict)
    """The share of each call's rows that the pushes of the steps before it change, by the call's name; calls without an
    entry count as 1."""
    several_trainers: bool = False
    """Whether other trainers push, too, so that reads of what pushes write stay in their step."""
    stale: bool = False
    """Whether reads may miss as many steps' pushes as the loop is deep."""

    def reads(self, module: GraphModule) -> dict[Node, CallAhead]:
        """Return the calls of a module that run ahead; stale ones as if no push wrote what they read."""
        if not self.stale:
            return may_run_ahead(module, several_trainers=self.several_trainers)
        return {node: replace(each, way=Way.NOTHING_WRITTEN) for node, each in may_run_ahead(module).items()}

    def changed(self, call: str, contract: Contract | None) -> float:
        """Return the share of a call's rows that are read again: none if the trainer updates them itself."""
        return 0.0 if contract is not None and contract.with_state is not None else self.conflicts.get(call, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """One remote call with nothing else in flight. See `fxlib.spec.profile.CallProfile`."""

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
    """Seconds that a wait takes longer if it blocks."""
    contract: Contract | None = None
    push: Push | None = None
    guessed: bool = False
    """Whether the figures are estimates, since no profile has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCost:
    """One message: a single call, or the calls of a batch."""

    calls: tuple[CallCost, ...]
    to: str
    issue_s: float
    request_bytes: int
    response_bytes: int
    work_s: float
    """Seconds on the server from the request's arrival to the answer's departure, if a worker is free at once."""
    latency_s: float
    """Seconds on the way there and back, in parallel with other messages."""
    intake_s: float
    """Seconds of the RPC layer's work, which is done for one message at a time: see
    `fxlib.spec.profile.ServerProfile.per_call_s`."""
    transfer_s: float
    """Seconds that request and answer take on free links."""

    @property
    def service_s(self) -> float:
        """Seconds from the end of the issue to the arrival of the answer, with nothing else in flight."""
        return self.transfer_s + self.latency_s + self.work_s + self.intake_s

    @property
    def guessed(self) -> bool:
        """Whether the time of the answer is an estimate."""
        return any(call.guessed for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of one graph."""

    seconds: dict[Node, float] = field(repr=False)
    """Seconds of each node's work on the trainer's thread, without the time it blocks."""
    value_bytes: dict[Node, int] = field(repr=False)
    """Bytes of each value's own memory; the bytes of a result belong to its wait."""
    views: set[Node] = field(repr=False)
    """Values that lie in the memory of their first input."""
    messages: dict[Node, MessageCost] = field(repr=False)
    """Messages by the nodes that send them: issues, and blocking calls."""
    results: dict[Node, CallCost] = field(repr=False)
    """The call whose result each wait, or blocking call, returns."""
    servers: Mapping[str, ServerProfile]
    loss_s: float
    backward_s: float
    rest_s: float
    cores_s: float
    """Seconds of a step for which the cores of the launcher's host are busy, whatever is hidden behind what."""
    measured: bool
    """Whether there is a profile."""

    @classmethod
    def of(cls, module: GraphModule, profile: Profile | None) -> Costs:
        """Look a module's nodes up in a profile, or estimate them, in linear time."""
        return _Ledger(module, profile or Profile(), measured=profile is not None).costs()


class _Ledger:
    """One walk over a graph."""

    def __init__(self, module: GraphModule, profile: Profile, *, measured: bool) -> None:
        self._module = module
        self._profile = profile
        self._measured = measured
        self._estimator = _Estimator(module)
        self._servers = dict(profile.server_by_name)
        self._seconds: dict[Node, float] = {}
        self._bytes: dict[Node, int] = {}
        self._messages: dict[Node, MessageCost] = {}
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
                seconds.setdefault(node, _WAIT_S)
                sizes.setdefault(node, 0)
            else:
                found = known.get(node.name)
                seconds[node] = estimate(node) if found is None else found.seconds
                if is_view(node):
                    views.add(node)
                    sizes[node] = 0
                else:
                    sizes[node] = _value_bytes(node) if found is None else found.output_bytes
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
            cores_s=self._profile.cores_s,
            measured=self._measured,
        )

    def _send(self, node: Node) -> None:
        waits = (waits_of(node) if is_batch(node) else None) or (node,)
        calls = tuple(self._call(each) for each in waits)
        servers = [self.server(call.to) for call in calls]  # a profile of another graph may have several of these
        message = message_of(calls, servers[0], serial=is_serial(node))
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
        """Return the call of a node, which is its blocking form, its issue, or its wait in a batch."""
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
            self._servers[name] = _server(name)
        return self._servers[name]


def issue_of(node: Node) -> Node:
    """Return the node that sent the call whose result a node returns: the node itself if it is a blocking call."""
    return node.all_input_nodes[0] if is_wait(node) else node


def is_serial(node: Node) -> bool:
    """Return whether a node issues a batch whose calls its server runs one after another."""
    return is_batch(node) and batched_by_of(node) is not None


def message_of(
    calls: tuple[CallCost, ...], server: ServerProfile, *, serial: bool, chains: Sequence[Sequence[CallCost]] = ()
) -> MessageCost:
    """Return the cost of calls to one server as one message.

    Args:
        calls: the calls.
        server: their server.
        serial: whether the server runs them one after another.
        chains: the calls in lists; the server runs each list one after another, and the lists in parallel. Without any,
            each call is a list of its own.
    """
    alone = [sum(work_s(call, server) for call in chain) for chain in chains or [[call] for call in calls]]
    sent, returned = sum(call.request_bytes for call in calls), sum(call.response_bytes for call in calls)
    first_s = max(intake_s(call, server) for call in calls)
    work = batch_work_s(alone, server, serial=serial)
    further_s = min(ITEM_INTAKE_SHARE * first_s * (len(calls) - 1), max(work - max(alone), 0.0))
    return MessageCost(
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


def behind(first: MessageCost, second: MessageCost) -> MessageCost:
    """Return the cost of two messages to one server as one, in which the second's calls come behind the first's."""
    calls = first.calls + second.calls
    further_s = min(ITEM_INTAKE_SHARE * first.intake_s * len(second.calls), second.work_s)
    return MessageCost(
        calls=calls,
        to=first.to,
        issue_s=first.issue_s + ITEM_S * len(second.calls),
        request_bytes=first.request_bytes + second.request_bytes,
        response_bytes=first.response_bytes + second.response_bytes,
        work_s=first.work_s + second.work_s - further_s,
        latency_s=max(first.latency_s, second.latency_s),
        intake_s=first.intake_s + further_s,
        transfer_s=first.transfer_s + second.transfer_s,
    )


def work_s(call: CallCost, server: ServerProfile) -> float:
    """Return the part of a call's service that is the server's work on it, in seconds."""
    return max(call.service_s - transfer_s(call, server) - _overhead_s(call, server), 0.0)


def _overhead_s(call: CallCost, server: ServerProfile) -> float:
    """Return the part of a call's service that is neither work nor transfer; a round trip includes an issue."""
    least_s = max(server.round_trip_s - call.issue_s, 0.0)
    return min(max(least_s, intake_s(call, server)), max(call.service_s - transfer_s(call, server), 0.0))


def intake_s(call: CallCost, server: ServerProfile) -> float:
    """Return the part of a call's service that is the RPC layer's work on it, in seconds."""
    most_s = INTAKE_SHARE * server.round_trip_s if server.per_call_s is None else server.per_call_s
    return min(most_s, max(call.service_s - transfer_s(call, server), 0.0))


def transfer_s(call: CallCost, server: ServerProfile) -> float:
    """Return the part of a call's service that its bytes spend on the links, in seconds."""
    return (call.request_bytes + call.response_bytes) / server.bytes_per_s


def batch_work_s(alone_s: list[float], server: ServerProfile, *, serial: bool) -> float:
    """Return how long a server works on a batch of calls, given the time of each call alone.

    A declared batched form runs the calls one after another, the generic batch runs them in parallel. The time that a
    further call adds is the measured one, if any; otherwise it is the call's own time, or the server's workers share
    the calls.
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
        issue_s=_ISSUE_S,
        wait_s=_WAIT_S,
        service_s=_SERVICE_S,
        request_bytes=_VALUE_BYTES,
        response_bytes=_VALUE_BYTES,
        guessed=True,
    )


def _server(name: str) -> ServerProfile:
    """Return the figures assumed for a server."""
    return ServerProfile(name=name, round_trip_s=_SERVICE_S, concurrency=16, bytes_per_s=1e9)


def _value_bytes(node: Node) -> int:
    """Return the size of a node's value, from `tensor_meta` if that is known."""
    shape = _shape(node)
    if shape is None:
        return _VALUE_BYTES
    dtype: torch.dtype = node.meta["tensor_meta"].dtype
    return math.prod(shape) * dtype.itemsize


class _Estimator:
    """Estimates seconds of local work. If no shapes are known, each operator and submodule is looked up once."""

    def __init__(self, module: GraphModule) -> None:
        """Look up the submodules that `call_module` nodes name in `module`."""
        self._module = module
        self._by_target: dict[object, float] = {}
        self._views: dict[object, bool] = {}

    def is_view(self, node: Node) -> bool:
        """Return whether the node is assumed to make no memory of its own."""
        found = self._views.get(node.target)
        if found is None:
            if node.op == "call_module":
                found = isinstance(self._module.get_submodule(str(node.target)), _VIEW_MODULES)
            else:
                found = node.target in TRACKERS or _name(node) in _VIEWS
            self._views[node.target] = found
        return found

    def seconds(self, node: Node) -> float:
        """Return the seconds of the node's work."""
        if "tensor_meta" in node.meta:
            return self._estimate(node)
        found = self._by_target.get(node.target)
        if found is None:
            self._by_target[node.target] = found = self._estimate(node)
        return found

    def _estimate(self, node: Node) -> float:
        if node.op == "call_module":
            return _module_seconds(self._module.get_submodule(str(node.target)), node)
        name = _name(node)
        if name in _VIEWS:
            return _VIEW_S
        if name in _PRODUCTS:
            return _product_seconds(node)
        return _OPERATOR_S + _elements(node) / _ELEMENTS_PER_S


def _module_seconds(module: nn.Module, node: Node) -> float:
    parts = [part for part in module.modules() if not list(part.children())]
    return sum(_leaf_seconds(part, node) for part in parts) or _VIEW_S


def _leaf_seconds(module: nn.Module, node: Node) -> float:
    if isinstance(module, nn.Linear):
        rows = max(_elements(node) // max(module.out_features, 1), 1) if _shape(node) else _ROWS
        return _OPERATOR_S + 2 * rows * module.in_features * module.out_features / _FLOPS_PER_S
    if isinstance(module, _HEAVY_MODULES):
        return _PRODUCT_S
    return _VIEW_S if isinstance(module, _VIEW_MODULES) else _OPERATOR_S + _elements(node) / _ELEMENTS_PER_S


def _product_seconds(node: Node) -> float:
    """Multiply the result's elements by the width of the first argument, over which each is a sum."""
    first: Any = node.args[0] if node.args else None
    width = _shape(first)[-1:] if isinstance(first, Node) and _shape(first) else None  # type: ignore[index]
    if _shape(node) is None or not width:
        return _PRODUCT_S
    return _OPERATOR_S + 2 * _elements(node) * width[0] / _FLOPS_PER_S


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _elements(node: Node) -> int:
    return math.prod(_shape(node) or (0,))


def _shape(node: Node) -> tuple[int, ...] | None:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    if shape is None or not all(isinstance(each, int) for each in shape):
        return None
    return tuple(shape)
