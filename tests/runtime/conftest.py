"""The RPC world that tests of the runtime share."""

import gc
import time
from collections.abc import Iterator

import pytest

from fxlib.runtime.deadlines import DEADLINES
from fxlib.runtime.underway import UNDERWAY
from fxlib.workload import Server
from tests.runtime.early import log
from tests.runtime.world import rpc_world

SERVERS = ("ps0", "ps1")


@pytest.fixture(scope="module")
def servers() -> Iterator[None]:
    """Two servers, "ps0" and "ps1", and this process as "trainer"."""
    with rpc_world(Server(name="ps0"), Server(name="ps1")):
        yield


@pytest.fixture(autouse=True)
def nothing_in_flight() -> None:
    """Have no call in flight that another test has not waited for: it would lengthen the deadlines of this one's."""
    for _ in range(6000):
        if not DEADLINES.in_flight:
            return
        time.sleep(0.01)
    pytest.fail("a call of another test does not end")


@pytest.fixture
def nothing_under_way() -> Iterator[None]:
    """Have no gradient on its way to a server, and servers that have forgotten what reached them, before and after."""
    for server in SERVERS:
        log(server)
    yield
    gc.collect()  # modules that were dropped in the middle of a step
    for server in SERVERS:
        UNDERWAY.settle(server)
        log(server)
