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
class ServerState:
    """A named part of a server's state. None stands for any server, or for any part."""

    server: str | None = None
    name: str | None = None


Resource: TypeAlias = Storage | Generator | ServerState

GENERATOR = Generator()
ANY_STATE = ServerState()
_FETCHES: frozenset[object] = frozenset({FETCH.blocking, FETCH.issue})


def contract_of_call(node: Node) -> Contract | None:
    """Return the contract that a call, its issue, or an RRef's creation carries; None if nothing is known."""
    contract = node.meta.get("contract")
    return contract if isinstance(contract, Contract) else None


def destination(node: Node) -> str | None:
    """Return the server that a call goes to, or None when only the run can tell."""
    to = node.args[0] if node.args else None
    return to if isinstance(to, str) else None


def function_name(node: Node) -> str:
    """Return the name of the remote function that a call names, or what the node calls where it names none."""
    if len(node.args) > 1 and isinstance(node.args[1], str):
        return node.args[1]
    return getattr(node.target, "__name__", str(node.target))


def reads_and_writes(node: Node) -> tuple[frozenset[ServerState], frozenset[ServerState]]:
    """Return what a call does to the state of servers. A call without a contract may write anything anywhere."""
    contract, server = contract_of_call(node), destination(node)
    if node.target in _FETCHES:
        return frozenset({ServerState(server=None)}), frozenset()  # the value behind an RRef may be any server's state
    if contract is None:
        return frozenset(), frozenset({ANY_STATE})
    reads = frozenset(ServerState(server, _part(name)) for name in contract.reads)
    return reads, frozenset(ServerState(server, _part(name)) for name in contract.writes)


def is_creation(node: Node) -> bool:
    """Whether the node creates an RRef: an issue without a wait."""
    return node.target is ops.create


def _part(name: str) -> str | None:
    return None if name == "*" else name
