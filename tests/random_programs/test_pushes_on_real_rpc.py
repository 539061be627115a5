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
from tests.shared.many import many
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


def test_trainings_that_are_rewritten_do_what_the_trainings_do() -> None:
    for seed in range(many(10)):
        training = random_training(seed)
        found = differences(training, lambda _: fresh_servers())
        assert not found, f"seed {seed}: {found}\n{training.deviations}\n{training.module.code}"
