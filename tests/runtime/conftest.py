"""The RPC world that tests of the runtime share."""

import time
from collections.abc import Iterator

import pytest

from fxlib.runtime.tracking.flow_control import DEADLINES
from fxlib.spec.workload import Server
from tests.runtime.gradients.pushing import log
from tests.shared.rpc_world import rpc_world

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
def empty_logs() -> Iterator[None]:
    """Have servers that have forgotten what reached them, before and after."""
    for server in SERVERS:
        log(server)
    yield
    for server in SERVERS:
        log(server)
