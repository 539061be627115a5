"""Stale reads over TensorPipe, from servers that dawdle: none misses more pushes than the loop allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import rpc

import fxlib
from fxlib.spec.workload import Server
from tests.pipeline.test_stale import batches, module_of, train
from tests.random_programs import simulation
from tests.random_programs.simulation import SERVERS
from tests.shared.many import many
from tests.shared.rpc_world import rpc_world

pytestmark = pytest.mark.slow

STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with rpc_world(*(Server(name=name) for name in SERVERS)):
        yield


def forget_pushes() -> None:
    simulation._OWN.pop("pushes", None)


@pytest.mark.parametrize("defer_pushes", [False, True], ids=["answered", "left in flight"])
@pytest.mark.parametrize("concurrent", [False, True], ids=["awaited", "concurrent"])
@pytest.mark.parametrize("depth, stale", [(1, 0), (1, 1), (2, 1), (2, 2), (1, 3), (3, 3)])
def test_no_read_misses_more_pushes_than_it_may(depth: int, stale: int, concurrent: bool, defer_pushes: bool) -> None:
    for rewritten in (False, True) * many(1):
        for server in SERVERS:
            rpc.rpc_sync(server, forget_pushes)
        module = module_of(concurrent=concurrent, rewritten=rewritten)
        loop = fxlib.pipeline(batches(STEPS), module, depth=depth, stale=stale, defer_pushes=defer_pushes, trainers=1)
        missed = [[made - seen for seen in train(module, x)] for made, x in enumerate(loop)]
        assert all(0 <= each <= stale for step in missed for each in step), missed
        assert sum(map(sum, missed)) <= sum(steps * reads for steps, reads in loop.staleness.items())
        assert max(loop.staleness, default=0) <= stale
        if stale and not defer_pushes:
            steady = min(depth, stale)
            assert loop.staleness[steady] == len(SERVERS) * (STEPS - steady)
