"""A scripted service, and connections to it."""

from collections.abc import Iterator

import pytest
from torch.distributed import rpc

from fxlib.client.connection import Connection
from tests.client.scripted import Scripted, serving


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep models from asking the servers that other tests may have left in this process."""
    monkeypatch.setattr(rpc.api, "_is_current_rpc_agent_set", lambda: False)


@pytest.fixture
def service() -> Scripted:
    return Scripted()


@pytest.fixture
def address(service: Scripted) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def connection(address: str) -> Iterator[Connection]:
    opened = Connection(address)
    yield opened
    opened.close()
