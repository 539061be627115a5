"""One service for all tests of the loop, and the workers at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fxlib
from fxlib.client import Client
from tests.loop.processes import Service, Worker
from tests.shared.collector import Collector, collecting


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loop")


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Where service, workers and launchers of these tests send their traces."""
    with collecting() as made:
        yield made


@pytest.fixture(scope="package")
def service(folder: Path, collector: Collector) -> Iterator[Service]:
    made = Service(folder)
    yield made
    made.end()


@pytest.fixture(scope="package")
def workers(service: Service, folder: Path) -> Iterator[list[Worker]]:
    """The workers at hand: one, unless a test has replaced it."""
    made = [Worker(service, folder, "first")]
    yield made
    for worker in made:
        worker.end()
    assert [worker.left() for worker in made] == [[] for _ in made]


@pytest.fixture
def client(service: Service, workers: list[Worker]) -> Iterator[Client]:
    with fxlib.connect(service.address) as made:
        yield made
