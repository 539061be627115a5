"""One process of a trial: a Ray actor that joins the trial's RPC world."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import distributed
from torch.distributed import rpc

from fxlib.runtime import functions
from fxlib.spec.workload import Optimizer, RemoteObject, Server
from fxlib_workers.process.exceptions import tells
from fxlib_workers.process.limits import limit_files, limit_processes
from fxlib_workers.trial import servers
from fxlib_workers.trial.replay import server as stage
from fxlib_workers.trial.replay.plan import Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process's place in the world of a trial."""

    name: str
    rank: int
    world_size: int
    interface: str
    allowed_modules: tuple[str, ...]
    memory_bytes: int
    file_bytes: int
    threads: int
    calls_at_once: int = 16
    """Threads that answer calls."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the world meets: the address of its store."""

    host: str
    port: int


class Member:
    """A process of a trial, in its place."""

    def __init__(self, place: Place) -> None:
        self._place = place
        torch.set_num_threads(min(place.threads, psutil.cpu_count() or 1))
        for module in place.allowed_modules:
            functions.allow_module(module)

    def pid(self) -> int:
        """Return the process's id."""
        return os.getpid()

    def host_meeting(self) -> Meeting:
        """Start the store at which the world meets, on a free port of the trial's interface."""
        host = _address(self._place.interface)
        # Bound here: a store that binds its own port listens on all interfaces.
        listener = socket.create_server((host, 0))
        port: int = listener.getsockname()[1]
        self._store = distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return Meeting(host, port)

    def join(self, meeting: Meeting) -> None:
        """Enter the world, over TCP alone: shared memory would measure no network. Then limit what is taken."""
        os.environ["TP_SOCKET_IFNAME"] = self._place.interface
        place = self._place
        self._meeting = meeting

        def meet(*_: Any, **__: Any) -> Iterator[tuple[distributed.Store, int, int]]:
            yield self._meeting_point(), place.rank, place.world_size

        distributed.register_rendezvous_handler("fxlib", meet)
        rpc.init_rpc(
            place.name,
            rank=place.rank,
            world_size=place.world_size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                num_worker_threads=place.calls_at_once,
                init_method="fxlib://",
                _transports=["uv"],
                _channels=["basic"],
            ),
        )
        limit = psutil.Process().memory_info().data + place.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        limit_files(place.file_bytes)
        limit_processes()

    def _meeting_point(self) -> distributed.Store:
        return distributed.TCPStore(self._meeting.host, self._meeting.port, is_master=False)

    def linger(self) -> None:
        """Never return: the call fails when the process ends, and so tells of it."""
        threading.Event().wait()


class ServerMember(Member):
    """A parameter server of a trial."""

    @tells
    def serve(self, server: Server, optimizer: Optimizer, seed: int) -> None:
        """Set the server's state up."""
        servers.serve(server, optimizer, seed)

    def not_served(self, names: list[str]) -> list[str]:
        """Return which of these remote functions the server cannot run."""
        return servers.not_served(names)

    def not_made(self, rrefs: Mapping[str, RemoteObject]) -> list[str]:
        """Return which of these RRefs' objects the server cannot make."""
        return servers.not_made(rrefs)

    def replay(self, script: Script) -> None:
        """Answer from the script what nobody here has."""
        stage.begin(script, self._place.name)


def _address(interface: str) -> str:
    addresses = psutil.net_if_addrs().get(interface, [])
    found = next((each.address for each in addresses if each.family == socket.AF_INET), None)
    if found is None:
        raise OSError(f"this host has no interface {interface!r} with an IPv4 address")
    return str(found)
