"""The processes around a program: servers that take their time, and the launcher that joins them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rpc import internal

from benchmarks.programs import catalogue
from benchmarks.programs.catalogue import Program
from benchmarks.programs.loading import quiet

_OF_TORCH = frozenset({"_local_invoke", "_local_invoke_async_execution", "_remote_forward"})
"""How torch calls methods of the objects behind RRefs, and remote modules."""


@contextlib.contextmanager
def joined(program: Program, sources: Path, service_ms: float, folder: Path, launcher: int) -> Iterator[None]:
    """Be one of the launchers of a program; the first one starts the servers, each call to which takes so much longer.

    Args:
        program: names the servers.
        sources: the folder of the programs.
        service_ms: what each call takes longer, in milliseconds.
        folder: where the processes meet.
        launcher: which of the launchers this is.
    """
    meeting = f"file://{folder / 'rpc'}"
    first, world_size = program.launchers, len(program.servers) + program.launchers
    command = [sys.executable, "-m", "benchmarks.programs.world", program.name, str(sources), str(service_ms), meeting]
    ranks = range(first, world_size) if launcher == 0 else ()
    servers = [subprocess.Popen([*command, str(rank)]) for rank in ranks]
    try:
        _join(f"launcher{launcher}", launcher, world_size, meeting)
        if program.parallel:
            group = f"file://{folder / 'group'}"
            dist.init_process_group("gloo", init_method=group, rank=launcher, world_size=first)
        yield
        if program.parallel:
            dist.destroy_process_group()
        rpc.shutdown()
    finally:
        for server in servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()


def seed(number: int) -> None:
    """Begin the random numbers of this process anew."""
    torch.manual_seed(number)


def gradients(rref: Any, context: int) -> list[torch.Tensor]:
    """Return what a distributed autograd context holds for the module behind an RRef, in order of its parameters."""
    held = dist_autograd.get_gradients(context)
    found = rref.local_value()
    parameters = list(found.parameters()) if isinstance(found, nn.Module) else []
    return [held[each].to_dense() for each in parameters if each in held]


def main() -> None:
    """Be one server, until all processes are done."""
    name, sources, service_ms, meeting, rank = sys.argv[1:]
    program = catalogue.named(name)
    quiet()
    torch.set_num_threads(1)
    module = program.load(Path(sources))
    internal._run_function = _slow(internal._run_function, module.__name__, float(service_ms) / 1e3)
    place = int(rank) - program.launchers
    _join(program.servers[place], int(rank), len(program.servers) + program.launchers, meeting)
    rpc.shutdown()


def _slow(run: Callable[[Any], Any], module: str, seconds: float) -> Callable[[Any], Any]:
    """Let each call of the program's own take so much longer, and none of RPC's and fxlib's."""

    def run_slowly(called: Any) -> Any:
        function = getattr(called, "func", None)
        if getattr(function, "__name__", "") in _OF_TORCH or getattr(function, "__module__", "") == module:
            time.sleep(seconds)
        return run(called)

    return run_slowly


def _join(name: str, rank: int, world_size: int, meeting: str) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=16, init_method=meeting, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


if __name__ == "__main__":
    main()
