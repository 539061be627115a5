"""The RPC world of the capture tests."""

from collections.abc import Iterator

import pytest

from fxlib.spec.workload import Server
from tests.shared.rpc_world import rpc_world


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """Two servers, "ps0" and "ps1", and this process as "trainer"."""
    with rpc_world(Server(name="ps0"), Server(name="ps1")):
        yield
