"""Finds the calls of a graph that may run ahead of their step, and why the others may not.

A call that runs ahead is made during the step before its own, for a batch that was pulled early. It crosses the end of
that step, with its pushes, and everything before it in its own forward. Therefore it must only read, its arguments must
depend on inputs and constants alone (its *prologue*), and nothing in the graph may write what it reads. What the loop
itself does between two forwards is not part of a graph: `fxlib.pipeline` checks it at run time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import GraphModule, Node

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import (
    GENERATOR,
    ServerState,
    Storage,
    contract_of_call,
    declared_contract,
    destination,
    function_name,
    states_of,
)
from fxlib.analysis.operators.operator_tables import RREF_METHODS
from fxlib.analysis.operators.schemas import attribute
from fxlib.reasons import Reason
from fxlib.runtime import ops
from fxlib.runtime.ops.calls import is_call, is_issue
from fxlib.runtime.ops.contract_lookup import contracts_in
from fxlib.runtime.ops.registry import CREATIONS, TRACKERS, is_batch, items_of
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.contract import Contract
from fxlib.wire import OpaqueRRef


class Way(Enum):
    """How a call may run ahead."""

    NOTHING_WRITTEN = "nothing_written"
    """No push of the module writes what the call reads: it may leave as soon as its batch is known."""
    BEHIND_PUSH = "behind_push"
    """A push writes what the call reads: it may leave with or after the pushes of the step before."""
    BY_KEYS = "by_keys"
    """Pushes write rows of what the call reads, and say which: it may leave at once, and those rows are read again."""
    STALE = "stale"
    """A push writes what the call reads, and the program lets it miss some: no call has this way by its contract."""


def ways(of_calls: Collection[Way]) -> tuple[Way, ...]:
    """Return the ways to choose from: a read that may run ahead by keys may also run behind the push."""
    if Way.BY_KEYS in of_calls:
        return Way.BY_KEYS, Way.BEHIND_PUSH
    return (Way.BEHIND_PUSH,) if Way.BEHIND_PUSH in of_calls else (Way.NOTHING_WRITTEN,)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAhead:
    """Whether one call of a graph may run ahead of its step."""

    node: Node
    """The call in its blocking form, or its issue."""
    name: str
    """Name of the call as captured; for a batch, the name of its issue."""
    way: Way | None
    """The way in which the call may run ahead; None if it may not."""
    reason: Reason
    detail: str = ""
    remedy: str = ""
    """The declaration or change that would let the call run ahead; empty if there is none."""
    prologue: tuple[Node, ...] = ()
    """The nodes from which the call's arguments are computed, in graph order, including inputs."""
    reads: frozenset[ServerState] = frozenset()
    contracts: tuple[Contract | None, ...] = ()
    """The contract of the call, or of each call of a batch."""
    concurrent: bool = False
    """Whether it may run concurrently with pushes to what it reads."""

    def __str__(self) -> str:
        """Return a one-line summary."""
        text = f"{self.name}: {self.reason.sentence(self.detail)}"
        return f"{text} ({self.remedy})" if self.remedy else text


def calls_ahead(module: GraphModule) -> tuple[CallAhead, ...]:
    """Return, for each call of a module's graph in order, whether it may run ahead."""
    return tuple(_Analyst(module).of_calls())


def may_run_ahead(module: GraphModule, *, several_trainers: bool = False) -> dict[Node, CallAhead]:
    """Return the calls that may run ahead; with several trainers, reads of what pushes write stay in their step."""
    return {
        each.node: each
        for each in calls_ahead(module)
        if each.way is Way.NOTHING_WRITTEN or (each.way is not None and not several_trainers)
    }


def pushed(module: GraphModule) -> dict[str, frozenset[ServerState]]:
    """Return what pushing the gradients of a module's results writes, by the remote function that takes them.

    A function without a contract in this process or in the graph may write anything.
    """
    found: dict[str, frozenset[ServerState]] = {}
    for node in module.graph.nodes:
        if node.target in TRACKERS:
            server, name = node.args[1], str(node.args[2])
            contract = declared_contract(name) or node.meta.get("contract")
            written = states_of(contract, server if isinstance(server, str) else None)[1]
            found[name] = found.get(name, frozenset()) | written
    return found


def meet(reads: Iterable[ServerState], writes: Iterable[ServerState]) -> bool:
    """Return whether a write may change what is read."""
    written = list(writes)
    return any(read.meets(write) for read in reads for write in written)


@dataclass(frozen=True, slots=True)
class _Refusal(Exception):  # noqa: N818 - no error: the analysis of one call ends with it
    reason: Reason
    detail: str = ""
    remedy: str = ""


class _Analyst:
    """Examines the calls of one graph."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._effects = Effects.of(module)
        self._pushed = pushed(module)
        self._contracts = contracts_in(module.graph)
        trackers = [node for node in module.graph.nodes if node.target in TRACKERS]
        self._of_gradients = {str(node.args[2]): node.meta.get("contract") for node in trackers}
        self._writers = [
            (node, written)
            for node, does in zip(self._effects.nodes, self._effects.per_node, strict=True)
            if (written := frozenset(each for each in does.writes if isinstance(each, ServerState)))
            and does.part is not Part.WAIT
        ]
        self._fences = [
            node
            for node, does in zip(self._effects.nodes, self._effects.per_node, strict=True)
            if does.fence is Reason.OPAQUE_NEIGHBOUR
        ]

    def of_calls(self) -> Iterator[CallAhead]:
        for node in self._effects.nodes:
            if is_call(node) or is_issue(node) or node.target in CREATIONS:
                yield self._of(node)

    def _of(self, call: Node) -> CallAhead:
        try:
            self._check_call(call)
            prologue = self._prologue(call)
        except _Refusal as refusal:
            return CallAhead(
                node=call,
                name=call_name(call),
                way=None,
                reason=refusal.reason,
                detail=refusal.detail,
                remedy=refusal.remedy,
            )
        reads = self._reads(call)
        pushes = sorted(name for name, written in self._pushed.items() if meet(reads, written))
        undeclared = self._without_keys(call, pushes) if pushes else []
        by_keys = bool(pushes) and not undeclared
        behind = Way.BY_KEYS if by_keys else Way.BEHIND_PUSH
        after = Reason.RUNS_BY_KEYS if by_keys else Reason.RUNS_BEHIND_PUSH
        contracts = tuple(contract for _, contract in self._contracts_of(call))
        return CallAhead(
            node=call,
            name=call_name(call),
            way=behind if pushes else Way.NOTHING_WRITTEN,
            reason=after if pushes else Reason.RUNS_AHEAD,
            detail=", ".join(pushes),
            remedy=f"keys= on {', '.join(undeclared)} would let it leave before the push" if undeclared else "",
            prologue=prologue,
            reads=reads,
            contracts=contracts,
            concurrent=all(each is not None and each.concurrent for each in contracts),
        )

    def _contracts_of(self, call: Node) -> list[tuple[str, Contract | None]]:
        """Return the function of a call, or of each call of a batch, with its contract."""
        if is_batch(call):
            return [(each.function, self._contracts.get(each.function)) for each in items_of(call)]
        return [(function_name(call), contract_of_call(call))]

    def _reads(self, call: Node) -> frozenset[ServerState]:
        rref = self._rref_of(call)
        return states_of(contract_of_call(call), destination(call) if rref is None else rref.owner_name() or None)[0]

    def _without_keys(self, call: Node, pushes: Iterable[str]) -> list[str]:
        """Return the functions that would have to declare their keys for the call to be repaired row by row."""
        read = dict(self._contracts_of(call))
        written = {name: declared_contract(name) or self._of_gradients.get(name) for name in pushes}
        return sorted(name for name, found in {**read, **written}.items() if found is None or found.keys is None)

    def _check_call(self, call: Node) -> None:
        """Refuse a call that by itself may not run ahead."""
        if not (is_batch(call) or call.target in (ops.remote_call, ops.issue_call)):
            raise _Refusal(Reason.AHEAD_KIND, function_name(call))
        if self._effects[call].part is Part.FENCE:
            raise _Refusal(Reason.ALREADY_ASYNC)
        name, contract = function_name(call), contract_of_call(call)
        if contract is None:
            raise _Refusal(Reason.UNKNOWN_CONTRACT, remedy=f"declare @fxlib.remote(reads=...) on {name}")
        if not contract.is_read:
            raise _Refusal(Reason.WRITES_STATE, ", ".join(sorted(contract.writes)))
        if destination(call) is None and self._rref_of(call) is None:
            remedy = "name the server by a constant, or by an RRef that the module holds"
            raise _Refusal(Reason.UNKNOWN_DESTINATION, remedy=remedy)
        reads = self._reads(call)
        for node, written in self._writers:
            if meet(reads, written):
                writer = function_name(node)
                undeclared = contract_of_call(node) is None
                remedy = f"declare what {writer} reads and writes, by @fxlib.remote" if undeclared else ""
                raise _Refusal(Reason.AHEAD_WRITTEN, writer, remedy)

    def _rref_of(self, call: Node) -> Any:
        """Return the module's RRef to which a call goes, by itself or by its owner; None if there is none."""
        to = call.args[0]
        if isinstance(to, Node) and to.op == "call_method" and to.target in RREF_METHODS:
            to = to.args[0]
        value = attribute(self._module, str(to.target)) if isinstance(to, Node) and to.op == "get_attr" else None
        return value if isinstance(value, (rpc.PyRRef, OpaqueRRef)) else None

    def _prologue(self, call: Node) -> tuple[Node, ...]:
        """Return the nodes that a call's arguments are computed from; refuse what may differ in the step before."""
        found: set[Node] = set()
        ahead = list(call.all_input_nodes)
        while ahead:
            node = ahead.pop()
            if node not in found:
                self._check_work(node)
                found.add(node)
                ahead.extend(node.all_input_nodes)
        if any(isinstance(each, Storage) for each in self._effects[call].reads):
            raise _Refusal(Reason.AHEAD_ARGUMENT_WRITTEN, call_name(call))
        self._check_fences(found, call)
        return tuple(sorted(found, key=self._effects.index.__getitem__))

    def _check_work(self, node: Node) -> None:
        does, operator = self._effects[node], self._effects.behaviours[self._effects.index[node]].operator
        if does.part in (Part.WAIT, Part.CALL, Part.ISSUE):
            raise _Refusal(Reason.AHEAD_NEEDS_RESULT, call_name(node))
        if does.part is Part.FENCE:
            raise _Refusal(Reason.AHEAD_OPAQUE, str(node.target))
        if does.part is Part.STATE and not _is_constant(attribute(self._module, str(node.target))):
            raise _Refusal(Reason.AHEAD_NEEDS_STATE, str(node.target), "make it a buffer, if no step changes it")
        if operator is not None and operator.state:
            raise _Refusal(Reason.AHEAD_NEEDS_STATE, f"the weights of {node.target}")
        if GENERATOR in does.writes:
            raise _Refusal(Reason.AHEAD_RANDOM, node.name)
        if does.reads or does.writes:
            raise _Refusal(Reason.AHEAD_ARGUMENT_WRITTEN, node.name)

    def _check_fences(self, prologue: set[Node], call: Node) -> None:
        """Refuse arguments in memory that is passed to an opaque callable before the call.

        Memory from outside is watched by its version as the program runs.
        """
        aliases, position = self._effects.aliases, self._effects.index[call]
        own = {aliases.of(node) for node in prologue if node.op not in ("placeholder", "get_attr")}
        for fence in self._fences:
            if self._effects.index[fence] > position:
                return
            if any(aliases.of(value) in own for value in fence.all_input_nodes):
                raise _Refusal(Reason.AHEAD_OPAQUE, str(fence.target))


def _is_constant(value: object) -> bool:
    """Return whether changes of an attribute can be detected: a buffer has a version, and nothing changes an RRef."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter) and not value.requires_grad
    plain = (int, float, str, bool, type(None), torch.dtype, torch.device)
    return isinstance(value, (*plain, rpc.PyRRef, OpaqueRRef))
