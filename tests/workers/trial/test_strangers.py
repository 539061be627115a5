"""Whether another process of the host can join the RPC world of a trial, and so run code in it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed import rpc

from fxlib_workers.process.containment import HOST_NETWORK, Network, hold_network
from fxlib_workers.process.probe import Level
from tests.shared.forked import forks
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
    deadline = time.monotonic() + 10.0
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


def meet(network: Network) -> tuple[str, str]:
    """Start two processes of a trial on a network; return what each says."""
    policy = everything(network=network)
    torch.set_num_threads(1)
    first = start(lambda: take_part(0, "127.0.0.1", PORT), policy)
    second = run(lambda: take_part(1, "127.0.0.1", PORT), policy)
    return finish(*first), second


def meet_a_stranger(network: Network) -> tuple[str, str]:
    """Start a process of a trial on a network, and a stranger on the host's; return what each says, if anything."""
    child, said = start(lambda: take_part(0, "127.0.0.1", PORT), everything(network=network))
    told = ""
    try:
        told = run(lambda: intrude(PORT), None)
    finally:
        if not told.startswith("joined"):
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(said)
    return finish(child, said) if told.startswith("joined") else "", told


def in_fresh_process(meeting: Callable[[Network], tuple[str, str]], network: Network) -> tuple[str, str]:
    """Call a function where nothing joined an RPC world: torch lets no process, nor its children, change its rank."""
    with ProcessPoolExecutor(1, mp_context=forks()) as process:
        return process.submit(meeting, network).result()


@pytest.mark.slow
def test_processes_of_a_trial_find_each_other(network: Network) -> None:
    first, second = in_fresh_process(meet, network)
    assert first.startswith("joined")
    assert second.startswith("joined")


@pytest.mark.slow
def test_a_stranger_joins_where_the_network_is_the_host_s_and_nowhere_else(network: Network) -> None:
    """On the host's network nothing keeps a stranger out, which is why `isolated` is more than `private`."""
    first, stranger = in_fresh_process(meet_a_stranger, network)
    if network == HOST_NETWORK:
        assert stranger.startswith("joined uid=")
        assert first.startswith("joined")
    else:
        assert stranger == "nothing listens"
