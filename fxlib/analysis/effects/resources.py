"""Resources: everything that a node can read or write besides its own values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch.fx import Node

from fxlib.errors import ContractError
from fxlib.runtime import functions, ops
from fxlib.runtime.ops.calls import COLLECTIVE, client_of, is_wait, kind_of
from fxlib.runtime.ops.contract_lookup import method_sent
from fxlib.runtime.ops.registry import CALLS_BY_NAME, FETCHES, is_batch, is_item, item_of
from fxlib.spec.contract import Contract, contract_of


class Storage(NamedTuple):
    """Memory of tensors in this process: one alias class. It is a tuple, since these hash faster."""

    alias_class: int


@dataclass(frozen=True, slots=True)
class Generator:
    """The state of the random generators."""


@dataclass(frozen=True, slots=True)
class Process:
    """State of this process outside the graph: a call that runs here may write parameters, buffers or inputs."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """A named part of a server's state. None stands for any server, or for any part."""

    server: str | None = None
    name: str | None = None

    def meets(self, other: ServerState) -> bool:
        """Return whether the two may name the same state."""
        same_server = self.server is None or other.server is None or self.server == other.server
        return same_server and (self.name is None or other.name is None or self.name == other.name)


@dataclass(frozen=True, slots=True)
class Peers:
    """The other members of process groups, who take part in this process's collectives in one order for all groups."""


@dataclass(frozen=True, slots=True)
class Reductions:
    """The reductions of backward among members of process groups, in the reverse order of the forward."""


Resource: TypeAlias = Storage | Generator | Process | ServerState | Peers | Reductions

GENERATOR = Generator()
PROCESS = Process()
PEERS = Peers()
REDUCTIONS = Reductions()
ANY_STATE = ServerState()
COLLECTIVES: frozenset[object] = frozenset({COLLECTIVE.blocking, COLLECTIVE.issue})


def contract_of_call(node: Node) -> Contract | None:
    """Return the contract of a call, its issue, or the creation of an RRef; None if it has none.

    The contract of a batch is the union of its calls' contracts.
    """
    contract = node.meta.get("contract")
    return contract if isinstance(contract, Contract) else None


def destination(node: Node) -> str | None:
    """Return the server that a call goes to, or None if only the run determines it."""
    if (client := client_of(node)) is not None:
        to = client.destination(node.args, node.kwargs)
    else:
        to = node.args[0] if names_a_function(node) or is_batch(node) else None
    return to if isinstance(to, str) else None


def speaks_to(node: Node) -> str:
    """Return in words what a call reaches: a server, the expression for one, a process group, or a client by name."""
    if (client := client_of(node)) is not None:
        return client.reached(node)
    if node.target in COLLECTIVES:
        return f"process group {collective_arguments(node)[-1]}"
    return str(node.args[0]) if node.args else ""


def collective_arguments(node: Node) -> tuple[object, ...]:
    """Return the arguments of a collective's operator; the last is the group's name."""
    given = node.args[1]
    return given if isinstance(given, tuple) else ()


def names_a_function(node: Node) -> bool:
    """Return whether the node calls a remote function by its name, as opposed to a client of the user's own."""
    return node.target in CALLS_BY_NAME


def takes_contract(node: Node) -> bool:
    """Return whether the node makes or begins a call whose contract may be stated under its `function_name`."""
    return names_a_function(node) or (client_of(node) is not None and not is_wait(node))


def declared_contract(function: str) -> Contract | None:
    """Return the contract that a remote function declares here; None if it declares none or does not exist here."""
    try:
        return contract_of(functions.resolve(function))
    except ContractError:
        return None


def function_name(node: Node) -> str:
    """Return the name of the function that a call or an issue names, or else of what the node calls."""
    if (client := client_of(node)) is not None:
        return client.function
    if node.target in COLLECTIVES:
        return str(node.args[0])
    if node.target in FETCHES:
        return "fetch"
    if names_a_function(node):
        return str(node.args[1])
    if is_item(node):
        return item_of(node).function
    return getattr(node.target, "__name__", str(node.target))


def methods_sent(node: Node) -> tuple[str, ...]:
    """Return the names under which a contract may be stated for the method that a call passes to a helper.

    Capture gives the call that contract if it knows the helper: see `fxlib.runtime.ops.contract_lookup`.
    """
    name = method_sent(node.args[2]) if names_a_function(node) else ""
    if not name:
        return ()
    return (name, f".{name.rpartition('.')[2]}")


def is_collective(node: Node) -> bool:
    """Return whether the node is a functional collective, or one half of it."""
    return kind_of(node) is COLLECTIVE


def reads_and_writes(node: Node) -> tuple[frozenset[ServerState], frozenset[ServerState]]:
    """Return what a call reads and writes of servers' state; without a contract, it may write anything anywhere."""
    if node.target in FETCHES:
        return frozenset(
            {ServerState(server=None)}
        ), frozenset()  # the value behind an RRef may be the state of any server
    if node.target in COLLECTIVES:
        return frozenset(), frozenset()
    return states_of(contract_of_call(node), destination(node))


def states_of(contract: Contract | None, server: str | None) -> tuple[frozenset[ServerState], frozenset[ServerState]]:
    """Return what a call under a contract reads and writes on a server; without a contract, it may write anything."""
    if contract is None:
        return frozenset(), frozenset({ANY_STATE})
    reads = frozenset(ServerState(server, _part(name)) for name in contract.reads)
    return reads, frozenset(ServerState(server, _part(name)) for name in contract.writes)


def may_run_here(call: Node) -> bool:
    """Return whether a call or an issue is of unknown code, which may be told to run in this process."""
    return contract_of_call(call) is None and call.target not in FETCHES and call.target not in COLLECTIVES


def starts_at_once(issue: Node) -> bool:
    """Return whether a call to this process runs at its issue: calls of the program's own, and of its clients."""
    return issue.target is ops.start_call or client_of(issue) is not None


def _part(name: str) -> str | None:
    return None if name == "*" else name
