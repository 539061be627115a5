"""Reference servers on this machine, for demos, benchmarks and a user's own tests."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import rpc

from fxlib.spec.servers import Server

__all__ = ["local"]

_END_S = 10.0


@contextmanager
def local(servers: Sequence[Server], *, seed: int = 0, threads: int = 1, rpc_timeout_s: float = 60.0) -> Iterator[None]:
    """Start each server as a process of its own, act as their "trainer" over TCP in the block, and end them after it.

    A process can join only one group of fresh peers in its life (torch numbers groups by counters that fresh peers do
    not share), so use this once in a process.

    Args:
        servers: the servers to start.
        seed: the seed of the servers' state.
        threads: the number of intra-op threads of each server.
        rpc_timeout_s: the default timeout of calls, in seconds.
    """
    # The servers are forked from one process with all imports done: these take seconds in each process started anew.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fxlib.ps"])
    with tempfile.TemporaryDirectory() as folder:
        size = len(servers) + 1
        options = _options(folder, rpc_timeout_s)
        processes = [
            context.Process(target=_serve, args=(server, rank, size, seed, threads, folder, rpc_timeout_s), daemon=True)
            for rank, server in enumerate(servers, start=1)
        ]
        for process in processes:
            process.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about its own use of process groups
                rpc.init_rpc("trainer", rank=0, world_size=size, rpc_backend_options=options)
            try:
                yield
            except BaseException:
                rpc.shutdown(graceful=False)
                raise
            rpc.shutdown()
            for process in processes:
                process.join(_END_S)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(  # noqa: PLR0917 - a process takes its arguments in order
    server: Server, rank: int, size: int, seed: int, threads: int, folder: str, rpc_timeout_s: float
) -> None:
    from fxlib import ps

    threading.Thread(target=end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    ps.serve(server, rank=rank, world_size=size, options=_options(folder, rpc_timeout_s), seed=seed, threads=threads)


def end_with_parent() -> None:
    """Wait for the parent process to end, then end this one, too: a parent that is killed runs no exit handlers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _options(folder: str, rpc_timeout_s: float) -> rpc.TensorPipeRpcBackendOptions:
    # TCP is what hosts use between them; on one host, TensorPipe would otherwise move tensors by shared memory.
    return rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{Path(folder, 'meeting')}",
        num_worker_threads=32,
        rpc_timeout=rpc_timeout_s,
        _transports=["uv"],
        _channels=["basic"],
    )
