"""An RPC world for tests: this process is the trainer, and servers are spawned processes."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import rpc

import fxlib.ps
from fxlib.workload import Server


def options(meeting: Path) -> rpc.TensorPipeRpcBackendOptions:
    """TensorPipe over TCP, as between hosts."""
    return rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{meeting}", rpc_timeout=30, _transports=["uv"], _channels=["basic"]
    )


def _serve(server: Server, rank: int, world_size: int, meeting: Path) -> None:
    warnings.simplefilter("ignore")  # of torch, about its own use of process groups
    fxlib.ps.serve(server, rank=rank, world_size=world_size, options=options(meeting))


@contextmanager
def rpc_world(*servers: Server) -> Iterator[None]:
    """Join an RPC group as "trainer", with the given servers; leave it, and see the processes end."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting, size = Path(folder, "meeting"), len(servers) + 1
        processes = [
            spawn.Process(target=_serve, args=(server, rank, size, meeting), daemon=True)
            for rank, server in enumerate(servers, start=1)
        ]
        for process in processes:
            process.start()
        try:
            # A process's groups meet under their number, and to fresh servers this is the first.
            rpc._init_counter = 0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rpc.init_rpc("trainer", rank=0, world_size=size, rpc_backend_options=options(meeting))
            try:
                yield
            finally:
                rpc.shutdown()
                rpc._init_counter = 0
            for process in processes:
                process.join(20)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
