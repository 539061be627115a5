"""Whether another process of the host can join the RPC world of a trial, and so run code in it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed import rpc

from fxlib_workers.process.containment import HOST_NETWORK, Level, Network, hold_network
from tests.workers.process.contained import everything, finish, host, run, start

PORT = 29417
TIMEOUT_S = 60.0


def take_part(rank: int, address: str, port: int) -> str:
    """Join a world of two over loopback, have the other one say who it is, and return that."""
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    store = distributed.TCPStore(address, port, 2, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    distributed.register_rendezvous_handler("strangers", lambda *_, **__: iter([(store, rank, 2)]))
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="strangers://", rpc_timeout=TIMEOUT_S, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found: int = rpc.rpc_sync(f"rank{1 - rank}", os.getuid)
    if rank == 0:  # who has the store leaves last
        store.set("called", "")
        store.wait(["answered"])
    else:
        store.wait(["called"])
        store.set("answered", "")
    return f"joined uid={found}"


def intrude(port: int) -> str:
    """Take the second place of a world, once there is one on loopback; say how that ended."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if not client.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    else:
        return "nothing listens"
    return take_part(1, "127.0.0.1", port)


@pytest.fixture(params=["own", "host"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    if request.param == "host":
        yield HOST_NETWORK
        return
    if host().level() is not Level.ISOLATED:
        pytest.skip(f"this host isolates no process: {dict(host().missing)}")
    with hold_network() as made:
        yield made


@pytest.mark.slow
def test_processes_of_a_trial_find_each_other(network: Network) -> None:
    policy = everything(network=network)
    torch.set_num_threads(1)
    first = start(lambda: take_part(0, "127.0.0.1", PORT), policy)
    second = run(lambda: take_part(1, "127.0.0.1", PORT), policy)
    assert second.startswith("joined")
    assert finish(*first).startswith("joined")


@pytest.mark.slow
def test_a_stranger_joins_where_the_network_is_the_host_s_and_nowhere_else(network: Network) -> None:
    """On the host's network nothing keeps a stranger out, which is why `isolated` is more than `private`."""
    child, said = start(lambda: take_part(0, "127.0.0.1", PORT), everything(network=network))
    try:
        told = run(lambda: intrude(PORT), None)
    finally:
        if network is not HOST_NETWORK:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(said)
    if network is HOST_NETWORK:
        assert told.startswith("joined uid=")
        assert finish(child, said).startswith("joined")
    else:
        assert told == "nothing listens"
