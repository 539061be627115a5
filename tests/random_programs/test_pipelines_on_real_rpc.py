"""A training under `fxlib.pipeline` is the training: over TensorPipe, with servers that dawdle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxlib.spec.workload import Server
from tests.random_programs.simulation import SERVERS
from tests.random_programs.test_pipelines_of_trainings import differences
from tests.random_programs.test_pushes_on_real_rpc import fresh_servers
from tests.random_programs.trainings import random_training
from tests.shared.many import many
from tests.shared.rpc_world import rpc_world

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with rpc_world(*(Server(name=name) for name in SERVERS)):
        yield


@pytest.mark.parametrize("updated", [False, True], ids=["whole", "updated"])
def test_trainings_under_a_pipeline_do_what_the_trainings_do(updated: bool) -> None:
    for seed in range(many(8)):
        training = random_training(seed, loop=True, by_keys=updated, updated=updated)
        found = differences(training, lambda _: fresh_servers())
        assert not found, f"seed {seed}: {found}\n{training.deviations} {training.in_the_loop}\n{training.module.code}"
