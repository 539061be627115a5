"""Reference servers on this machine, for demos, benchmarks and tests of one's own."""

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
    """Start each server as a process of its own, be their "trainer" over TCP in the block, and end them after it.

    A process can join one group of fresh peers in its life (torch numbers groups by counters that fresh peers do not
    share), so use it once in a process.

    Args:
        servers: what to serve.
        seed: of the servers' state.
        threads: intra-op threads of each server.
        rpc_timeout_s: default timeout of calls, in seconds.
    """
    # Forked from one process that has imported what they need: that takes seconds, for each that is started anew.
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
                warnings.simplefilter("ignore")  # of torch, about its own use of process groups
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


def _serve(  # noqa: PLR0917 - of a process, which takes them in order
    server: Server, rank: int, size: int, seed: int, threads: int, folder: str, rpc_timeout_s: float
) -> None:
    from fxlib import ps

    threading.Thread(target=end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    ps.serve(server, rank=rank, world_size=size, options=_options(folder, rpc_timeout_s), seed=seed, threads=threads)


def end_with_parent() -> None:
    """Wait for the end of the process that started this one, then end too: a killed parent runs no exit handler."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _options(folder: str, rpc_timeout_s: float) -> rpc.TensorPipeRpcBackendOptions:
    # Over TCP, as between hosts: on one host TensorPipe would otherwise move tensors by shared memory.
    return rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{Path(folder, 'meeting')}",
        num_worker_threads=32,
        rpc_timeout=rpc_timeout_s,
        _transports=["uv"],
        _channels=["basic"],
    )
