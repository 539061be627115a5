"""The reference parameter server: sharded embedding tables and dense parameters, over `torch.distributed.rpc`.

The functions of this module run on the server; trainers call them by RPC. They declare what they read and write, so
that fxlib may move the calls:

>>> rpc_sync("ps0", fxlib.ps.lookup, args=("clicks", indices))  # [*indices.shape, dim]
>>> rpc_sync("ps0", fxlib.ps.push, args=("clicks", indices, gradient))  # the table's own optimizer, at once

Updates are bitwise reproducible: gradients of a row that is named twice in one push are summed in the order given, and
each push is applied by itself, in order of arrival. Lookups may overlap each other; a push to a table waits for lookups
that are reading it. How many calls travel in one message is not decided here but in `fxlib.passes.remote`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch.distributed import TCPStore, rpc
from torch.distributed import autograd as dist_autograd

from fxlib import batch
from fxlib.errors import WorkloadError
from fxlib.ps.state import EmbeddingTable, ServerState, place, updated_rows
from fxlib.spec.contract import remote
from fxlib.spec.servers import Server, ServiceTimePer

__all__ = [
    "check_meeting",
    "gradients",
    "load",
    "lookup",
    "lookup_attached",
    "lookup_bag",
    "lookup_bags",
    "lookup_many",
    "lookup_many_with_state",
    "lookup_with_state",
    "place",
    "pull",
    "push",
    "push_bag",
    "push_dense",
    "reset",
    "save",
    "serve",
    "set_service_time",
    "setup",
    "state_digest",
    "step",
    "updated",
    "use_own_store",
]

Pooling = Literal["sum", "mean"]
Found = TypeVar("Found")
Calls: TypeAlias = Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]
"""Positional and keyword arguments of calls that came together."""

_state: ServerState | None = None


def serve(
    server: Server,
    *,
    rank: int,
    world_size: int,
    options: rpc.TensorPipeRpcBackendOptions,
    seed: int = 0,
    threads: int = 1,
) -> None:
    """Run the server until every worker of the RPC group has shut down; this is the body of a server process.

    Args:
        server: the server's name, tables and dense parameters.
        rank: the rank of this process in the RPC group.
        world_size: the number of processes in the RPC group.
        options: options of the RPC layer; `init_method` says where the group meets.
        seed: the seed of the initial state.
        threads: the number of intra-op threads.

    Raises:
        WorkloadError: under `torchrun`, the group was to meet at a store that nobody serves there.
    """
    check_meeting(options)
    torch.set_num_threads(threads)
    setup(server, seed)
    rpc.init_rpc(server.name, rank=rank, world_size=world_size, rpc_backend_options=options)
    rpc.shutdown()


def use_own_store() -> None:
    """Under `torchrun`, have the processes of this attempt meet in a store of their own; call this before `init_rpc`.

    The store that `torchrun` serves survives its restarts, and torch takes what the processes of an earlier attempt
    have left there for the entries of their successors: `init_rpc` would wait for processes that are gone. With this
    function, rank 0 serves a store at a port that the others learn from the agent's store, and "env://" leads to it.
    Without `torchrun`, the function does nothing.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address, rank = os.environ["MASTER_ADDR"], int(os.environ["RANK"])
    agents = TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False)
    key = "fxlib/own_store/{TORCHELASTIC_RUN_ID}/{TORCHELASTIC_RESTART_COUNT}/{WORLD_SIZE}".format(**os.environ)
    if rank == 0:
        with socket.socket() as found:
            found.bind(("", 0))
            agents.set(key, str(found.getsockname()[1]))
    os.environ["MASTER_PORT"] = agents.get(key).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def check_meeting(options: rpc.TensorPipeRpcBackendOptions) -> None:
    """Report at once a problem that `init_rpc` would take five minutes to find.

    `torchrun` serves a store, and says so in the environment (TORCHELASTIC_USE_AGENT_STORE); torch then takes any
    "tcp://..." for that store's address, and serves none of its own. After a restart, that store still holds what
    earlier processes have left, whatever the address.

    Raises:
        WorkloadError: the group is to meet at such an address, or after a restart in the agent's store.
    """
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agents and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise WorkloadError(
            "torchrun has restarted the processes, and its store holds what those before have left: init_rpc would "
            "wait for them",
            where="rpc_backend_options.init_method",
            hint='Call fxlib.ps.use_own_store() first, and use init_method="env://".',
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and options.init_method.startswith("tcp://"):
        raise WorkloadError(
            f"under torchrun nobody serves a store at {options.init_method}, and init_rpc would wait for it",
            where="rpc_backend_options.init_method",
            hint='Use init_method="env://", after fxlib.ps.use_own_store().',
        )


def setup(server: Server, seed: int) -> None:
    """Hold the state that `server` describes, drawn from `seed`: equal seeds give equal bits."""
    global _state  # noqa: PLW0603 - remote functions find a process's state by its module
    _state = ServerState(server, seed)


def reset(seed: int) -> None:
    """Draw the whole state anew from `seed`, optimizer state included."""
    setup(_present().server, seed)


def save(folder: str) -> None:
    """Write each of this server's tables and dense parameters to a file of its own, with its optimizer's state.

    >>> rpc_sync("ps0", fxlib.ps.save, args=("/checkpoints/step-1000",))

    Files are named for tables, not for servers. If no two servers hold tables of the same name, all may write to one
    folder, and after a restart with another number of servers, each reads the tables that it then holds. Servers whose
    tables have the same names need a folder each: a file that another server wrote is not overwritten. No graph can
    name this function or `load`.

    Raises:
        WorkloadError: this process serves nothing, or another server wrote a file for a table of that name there.
        OSError: a file cannot be written.
    """
    _present().save(folder)


def load(folder: str) -> None:
    """Read what `save` wrote: everything that this server holds, or nothing.

    Raises:
        WorkloadError: this process serves nothing, a table was not saved, or was of another size, dtype or optimizer.
        OSError: a file cannot be read.
    """
    _present().load(folder)


def set_service_time(seconds: float, per: ServiceTimePer = "item") -> None:
    """Add a service time to each call from now on, in place of the network and the load of a real server.

    Args:
        seconds: the time to add, in seconds.
        per: for calls that came in one message, whether each call adds the time ("item": side by side where the calls
            run side by side, one after another in a batched form such as `lookup_many`), or all of them together do
            so once ("call").
    """
    state = _present()
    state.service_time_s, state.service_time_per = seconds, per


def state_digest() -> str:
    """Return the SHA-256 over all parameters and all optimizer state of this server."""
    return _present().digest()


@remote(
    reads="tables",
    part="table",
    keys="indices",
    concurrent=True,
    gradient="fxlib.ps:push",
    batched_by="fxlib.ps:lookup_many",
    with_state="fxlib.ps:lookup_with_state",
)
def lookup(table: str, indices: torch.Tensor) -> torch.Tensor:
    """Return rows of a table: integers of any shape to float32 [*indices.shape, dim].

    Raises:
        WorkloadError: this server has no such table.
        IndexError: an index is not a row of the table.
    """
    return _serving().table(table).rows(indices)


@remote(reads="tables")
def lookup_many(calls: Calls) -> list[torch.Tensor]:
    """Serve many calls of `lookup`, one after another, and return their results.

    Raises:
        WorkloadError: this server lacks one of the tables.
        IndexError: an index is not a row of its table.
    """
    return _in_turn(EmbeddingTable.rows, calls)


@remote(reads="tables", part="table", keys="indices", concurrent=True, batched_by="fxlib.ps:lookup_many_with_state")
def lookup_with_state(table: str, indices: torch.Tensor) -> batch.KnownRows:
    """Return rows as `lookup` does, with the state of their optimizer, in the form that `updated` takes.

    Raises:
        WorkloadError: this server has no such table.
        IndexError: an index is not a row of the table.
    """
    return _serving().table(table).known_rows(indices)


@remote(reads="tables")
def lookup_many_with_state(calls: Calls) -> list[batch.KnownRows]:
    """Serve many calls of `lookup_with_state`, one after another, and return their results.

    Raises:
        WorkloadError: this server lacks one of the tables.
        IndexError: an index is not a row of its table.
    """
    return _in_turn(EmbeddingTable.known_rows, calls)


@remote(writes="tables", part="table", keys="indices", update="fxlib.ps:updated")
def push(table: str, indices: torch.Tensor, gradient: torch.Tensor) -> None:
    """Apply the gradient [*indices.shape, dim] of a `lookup` by the table's optimizer.

    Raises:
        WorkloadError: this server has no such table.
        IndexError: an index is not a row of the table.
        ValueError: the gradient's shape does not fit.
    """
    _serving().table(table).update(indices, gradient)


@remote(pure=True)
def updated(known: batch.KnownRows, table: str, indices: torch.Tensor, gradient: torch.Tensor) -> batch.KnownRows:  # noqa: ARG001 - it takes the arguments of `push`
    """Return the rows, with the same bits, that a `push` would make of these; this function runs on the trainer."""
    return updated_rows(known, indices, gradient)


@remote(reads="tables", gradient="fxlib.ps:push_bag", batched_by="fxlib.ps:lookup_bags")
def lookup_bag(table: str, indices: torch.Tensor, offsets: torch.Tensor, *, mode: Pooling = "sum") -> torch.Tensor:
    """Return pooled rows of a table, float32 [bags, dim], for indices [n] in bags that start at offsets [bags].

    Raises:
        WorkloadError: this server has no such table.
        IndexError: an index is not a row of the table.
        ValueError: the mode or the offsets are not as described.
    """
    return _serving().table(table).pooled(indices, offsets, mode)


@remote(reads="tables")
def lookup_bags(calls: Calls) -> list[torch.Tensor]:
    """Serve many calls of `lookup_bag`, one after another, and return their results.

    Raises:
        WorkloadError: this server lacks one of the tables.
        IndexError: an index is not a row of its table.
        ValueError: a mode or offsets are not as described.
    """
    return _in_turn(EmbeddingTable.pooled, calls)


@remote(writes="tables", part="table", keys="indices")
def push_bag(
    table: str, indices: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor, *, mode: Pooling = "sum"
) -> None:
    """Apply the gradient [bags, dim] of a `lookup_bag` by the table's optimizer.

    Raises:
        WorkloadError: this server has no such table.
        IndexError: an index is not a row of the table.
        ValueError: a shape, the mode or the offsets are not as described.
    """
    _serving().table(table).update_pooled(indices, offsets, gradient, mode)


@remote(reads="dense", gradient="fxlib.ps:push_dense")
def pull(name: str) -> torch.Tensor:
    """Return a copy of a dense parameter.

    Raises:
        WorkloadError: this server has no such parameter.
    """
    return _serving().parameter(name).value()


@remote(writes="dense", part="name")
def push_dense(name: str, gradient: torch.Tensor) -> None:
    """Apply the gradient of a dense parameter by its optimizer.

    Raises:
        WorkloadError: this server has no such parameter.
        ValueError: the gradient's shape does not fit.
    """
    _serving().parameter(name).update(gradient)


@remote(reads="tables")
def lookup_attached(table: str, indices: torch.Tensor) -> torch.Tensor:
    """Return rows as `lookup` does, attached to the table, for `torch.distributed.autograd`.

    The gradient stays on the server, in the trainer's autograd context, until `step` or the context's end.

    Raises:
        WorkloadError: this server has no such table.
        IndexError: an index is not a row of the table.
    """
    return _serving().table(table).attached_rows(indices)


@remote(reads="tables")
def gradients(context_id: int) -> dict[str, torch.Tensor]:
    """Return the gradients that a distributed autograd context holds here: a dense one for each table it reached."""
    found = dist_autograd.get_gradients(context_id)
    tables = _serving().tables.items()
    return {name: found[table.weight].to_dense() for name, table in tables if table.weight in found}


@remote(writes="tables")
def step(context_id: int) -> None:
    """Apply the gradients of a distributed autograd context to this server's tables, each by its own optimizer."""
    found = dist_autograd.get_gradients(context_id)
    for table in _serving().tables.values():
        if table.weight in found:
            table.update_attached(found[table.weight])


def _present() -> ServerState:
    if _state is None:
        raise WorkloadError("this process serves no parameters", where="fxlib.ps", hint="Call fxlib.ps.setup first.")
    return _state


def _serving(items: int = 1) -> ServerState:
    """Return the state, after waiting for the service time of this many calls in one message, one after another."""
    state = _present()
    if state.service_time_s > 0.0:
        if state.service_time_per == "item":
            time.sleep(state.service_time_s * items)
        elif batch.is_first():
            time.sleep(state.service_time_s)
    return state


def _in_turn(read: Callable[..., Found], calls: Calls) -> list[Found]:
    state = _serving(len(calls))
    return [_read(state, read, *args, **kwargs) for args, kwargs in calls]


def _read(state: ServerState, read: Callable[..., Found], table: str, *args: Any, **kwargs: Any) -> Found:
    return read(state.table(table), *args, **kwargs)
