"""The RPC world of the tests: this process is the trainer, and two servers are spawned processes.

A process can join one RPC group of fresh peers in its life: torch numbers its groups and their barriers by counters
that fresh peers do not share. So all tests of a pytest process share one world, which ends with it. Outside of the
blocks that use it, RPC is not up for anybody in this process: no test meets what another one has left.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from torch.distributed import rpc

import fxlib.ps
from fxlib.ps.local import end_with_parent
from fxlib.spec.workload import Server
from tests.shared.forked import forks

NAMES = ("ps0", "ps1")
SIZE = len(NAMES) + 1
_processes: list[ForkServerProcess] = []
_blocks: list[None] = []
"""One for each block that is in the world now."""


@contextmanager
def rpc_world(*servers: Server) -> Iterator[None]:
    """Be "trainer", with servers "ps0" and "ps1" in the state described (seed 0)."""
    if not _processes:
        _start()
    _blocks.append(None)
    try:
        for server in servers:
            rpc.rpc_sync(server.name, fxlib.ps.setup, args=(server, 0))
        yield
    finally:
        _blocks.pop()


def _start() -> None:
    context = forks()
    folder = tempfile.mkdtemp()
    for rank, name in enumerate(NAMES, start=1):
        _processes.append(context.Process(target=_serve, args=(name, rank, folder), daemon=True))
        _processes[-1].start()
    atexit.register(_end, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own use of process groups
        rpc.init_rpc("trainer", rank=0, world_size=SIZE, rpc_backend_options=_options(folder))
    is_up = rpc.api._is_current_rpc_agent_set
    rpc.api._is_current_rpc_agent_set = lambda: bool(_blocks) and is_up()


def _serve(name: str, rank: int, folder: str) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    fxlib.ps.serve(Server(name=name), rank=rank, world_size=SIZE, options=_options(folder))


def _end(folder: str) -> None:
    _blocks.append(None)
    rpc.shutdown(graceful=False)
    for process in _processes:
        process.kill()
        process.join()
    shutil.rmtree(folder)


def _options(folder: str) -> rpc.TensorPipeRpcBackendOptions:
    # Over TCP, as between hosts.
    meeting = f"file://{Path(folder, 'meeting')}"
    return rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=60, _transports=["uv"], _channels=["basic"])
