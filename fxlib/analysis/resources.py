"""What a node can read or write besides its own values: the things that effects are about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import Node

from fxlib.contracts import Contract
from fxlib.runtime import ops
from fxlib.runtime.calls import FETCH


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory of tensors in this process: one class of aliases."""

    alias_class: int


@dataclass(frozen=True, slots=True)
class Generator:
    """The state of the random generators."""


@dataclass(frozen=True, slots=True)
class Process:
    """What this process keeps outside of the graph: a call that runs here may write parameters, buffers, inputs."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """A named part of a server's state. None stands for any server, or for any part."""

    server: str | None = None
    name: str | None = None


Resource: TypeAlias = Storage | Generator | Process | ServerState

GENERATOR = Generator()
PROCESS = Process()
ANY_STATE = ServerState()
FETCHES: frozenset[object] = frozenset({FETCH.blocking, FETCH.issue})
_NAMED: frozenset[object] = frozenset({ops.remote_call, ops.issue_call, ops.start_call, ops.create})
"""Operators whose first arguments are a destination and a function's name."""


def contract_of_call(node: Node) -> Contract | None:
    """Return the contract that a call, its issue, or an RRef's creation carries; None if nothing is known."""
    contract = node.meta.get("contract")
    return contract if isinstance(contract, Contract) else None


def destination(node: Node) -> str | None:
    """Return the server that a call goes to, or None when only the run can tell."""
    to = node.args[0] if names_a_function(node) else None
    return to if isinstance(to, str) else None


def names_a_function(node: Node) -> bool:
    """Whether the node calls a remote function by its name, as opposed to a client of the user's own."""
    return node.target in _NAMED


def function_name(node: Node) -> str:
    """Return the name of the remote function that a call names, or what the node calls where it names none."""
    if names_a_function(node):
        return str(node.args[1])
    return getattr(node.target, "__name__", str(node.target))


def reads_and_writes(node: Node) -> tuple[frozenset[ServerState], frozenset[ServerState]]:
    """Return what a call does to the state of servers. A call without a contract may write anything anywhere."""
    contract, server = contract_of_call(node), destination(node)
    if node.target in FETCHES:
        return frozenset({ServerState(server=None)}), frozenset()  # the value behind an RRef may be any server's state
    if contract is None:
        return frozenset(), frozenset({ANY_STATE})
    reads = frozenset(ServerState(server, _part(name)) for name in contract.reads)
    return reads, frozenset(ServerState(server, _part(name)) for name in contract.writes)


def may_run_here(call: Node) -> bool:
    """Whether a call or an issue is of unknown code, which may be told to run in this very process."""
    return contract_of_call(call) is None and call.target not in FETCHES


def starts_at_once(issue: Node) -> bool:
    """Whether the program issues the call itself, so that nobody waits for it where it is issued."""
    return issue.target is ops.start_call


def _part(name: str) -> str | None:
    return None if name == "*" else name
