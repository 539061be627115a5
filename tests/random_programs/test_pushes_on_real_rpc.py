"""A training whose gradients travel together is the training: over TensorPipe, with servers that dawdle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed import rpc

from fxlib.spec.workload import Server
from tests.random_programs.running import RealServers, real_servers
from tests.random_programs.simulation import SERVERS
from tests.random_programs.test_pushes_of_trainings import differences
from tests.random_programs.trainings import forget_rows, random_training
from tests.shared.rpc_world import rpc_world

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with rpc_world(*(Server(name=name) for name in SERVERS)):
        yield


@contextmanager
def fresh_servers() -> Iterator[RealServers]:
    for server in SERVERS:
        rpc.rpc_sync(server, forget_rows)
    with real_servers() as world:
        yield world


@pytest.mark.parametrize("seeds", [range(12), range(12, 60)], ids=["few", "many"])
def test_a_training_that_is_rewritten_does_what_the_training_does(seeds: range) -> None:
    for seed in seeds:
        training = random_training(seed)
        found = differences(training, lambda _: fresh_servers())
        assert not found, f"seed {seed}: {found}\n{training.deviations}\n{training.module.code}"
