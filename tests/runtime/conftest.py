"""The RPC world that tests of the runtime share."""

from collections.abc import Iterator

import pytest

from fxlib.workload import Server
from tests.runtime.world import rpc_world


@pytest.fixture(scope="module")
def servers() -> Iterator[None]:
    """Two servers, "ps0" and "ps1", and this process as "trainer"."""
    with rpc_world(Server(name="ps0"), Server(name="ps1")):
        yield
