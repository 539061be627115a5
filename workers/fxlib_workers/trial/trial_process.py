"""One process of a trial, which joins the others over `torch.distributed.rpc`."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import distributed
from torch.distributed import rpc

from fxlib.config import CACHE
from fxlib.runtime import bounds, functions
from fxlib.spec.workload import Optimizer, RemoteObject, Server
from fxlib_workers.process.exceptions import returns_exceptions
from fxlib_workers.process.limits import limit_files, limit_processes
from fxlib_workers.process.linux import address_of
from fxlib_workers.trial import server_state
from fxlib_workers.trial.replay import server as replay_server
from fxlib_workers.trial.replay.plan import ReplayPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """The configuration of one process of a trial.

    Attributes:
        name: the process's name in `torch.distributed.rpc`.
        rank: its rank: servers come first, then trainers.
        world_size: the number of processes.
        interface: the network interface over which the processes communicate.
        allowed_modules: the modules whose functions and classes the operator allows.
        memory_bytes: the memory that it may allocate in addition to that of the libraries.
        file_bytes: the size of the largest file that it may write.
        threads: the number of threads of torch's operators.
        concurrent_calls: the number of threads that answer calls.
    """

    name: str
    rank: int
    world_size: int
    interface: str
    allowed_modules: tuple[str, ...]
    memory_bytes: int
    file_bytes: int
    threads: int
    concurrent_calls: int = 16


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of the store through which the processes find each other."""

    host: str
    port: int


class TrialProcess:
    """A process of a trial."""

    def __init__(self, config: ProcessConfig) -> None:
        self._config = config
        os.environ[CACHE] = ""  # what is compiled in a trial is measured, and not kept
        bounds.install()
        torch.set_num_threads(min(config.threads, psutil.cpu_count() or 1))
        for module in config.allowed_modules:
            functions.allow_module(module)

    def host_store(self) -> StoreAddress:
        """Start the store through which the processes find each other, on a free port of the trial's interface."""
        host = address_of(self._config.interface)
        # The socket is bound here, since a store that binds its own port listens on all interfaces.
        listener = socket.create_server((host, 0))
        port: int = listener.getsockname()[1]
        self._hosted = distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return StoreAddress(host, port)

    def join(self, address: StoreAddress) -> None:
        """Join the other processes over TCP only, since shared memory would bypass the network, and set the limits."""
        config = self._config
        # RPC itself uses TensorPipe; its processes synchronize at their start and end by Gloo.
        os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = config.interface
        self._store_address = address

        def rendezvous(*_: Any, **__: Any) -> Iterator[tuple[distributed.Store, int, int]]:
            yield self._store(), config.rank, config.world_size

        distributed.register_rendezvous_handler("fxlib", rendezvous)
        rpc.init_rpc(
            config.name,
            rank=config.rank,
            world_size=config.world_size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                num_worker_threads=config.concurrent_calls,
                init_method="fxlib://",
                _transports=["uv"],
                _channels=["basic"],
            ),
        )
        limit = psutil.Process().memory_info().data + config.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        limit_files(config.file_bytes)
        limit_processes()

    def _store(self) -> distributed.Store:
        return distributed.TCPStore(self._store_address.host, self._store_address.port, is_master=False)


class ServerProcess(TrialProcess):
    """A parameter server of a trial."""

    @returns_exceptions
    def serve(self, server: Server, optimizer: Optimizer, seed: int) -> None:
        """Set up the server's state."""
        server_state.serve(server, optimizer, seed)

    def not_served(self, names: list[str]) -> list[str]:
        """Return which of these remote functions the server cannot run."""
        return server_state.not_served(names)

    def not_made(self, rrefs: Mapping[str, RemoteObject]) -> list[str]:
        """Return the RRefs whose objects the server cannot make."""
        return server_state.not_made(rrefs)

    def replay(self, plan: ReplayPlan) -> None:
        """Answer calls that no process of the trial can run, according to the plan."""
        replay_server.start(plan, self._config.name)
