"""The RPC world in which the tests measure."""

from collections.abc import Iterator

import pytest

from tests.profiling.clicks import world


@pytest.fixture
def servers() -> Iterator[None]:
    """Two servers with a table each, "ps0" of 2 ms and "ps1" of 20 ms, and this process as "trainer"."""
    with world():
        yield


@pytest.fixture
def quick_servers() -> Iterator[None]:
    """The same, both of 2 ms: for what does not depend on time."""
    with world(slow_s=0.002):
        yield
