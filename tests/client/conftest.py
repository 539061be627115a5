"""A scripted service, and connections to it."""

from collections.abc import Iterator

import pytest

import fxlib
from fxlib.client import Client
from fxlib.client.connection import Connection
from tests.client.scripted import Scripted, serving


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


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with fxlib.connect(address, patience_s=60) as opened:
        yield opened
