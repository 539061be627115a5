"""What the service remembers of workers: bounded, whoever invents how many."""

from pathlib import Path

import pytest

from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_service import workers
from fxlib_service.convert import worker_from_proto
from fxlib_service.errors import Code, ServiceError
from fxlib_service.stores.sql import SqlJobStore
from tests.service.support import claim, make_service, worker

pytestmark = pytest.mark.slow

LONG = ["m" * 200] * 300
"""Names of modules that take nearly as much as a worker may say."""


async def test_invented_workers_take_little_room_and_hide_nobody_else_s(tmp_path: Path) -> None:
    store = SqlJobStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    async with make_service(store) as core:
        known = core.optimizer._workers
        for number in range(3):
            await core.dispatcher.claim(worker_from_proto(worker(f"honest-{number}")), wait_s=0.0, principal="honest")
        said = worker("")
        said.allowed_modules.extend(LONG)
        for number in range(150):
            said.worker_id = f"invented-{number}"
            await core.dispatcher.claim(worker_from_proto(said), wait_s=0.0, principal="hostile")
        told = await core.optimizer.GetCapabilities(jobs_pb2.GetCapabilitiesRequest(), None)
        names = {each.worker_id for each in told.workers}
        assert {"honest-0", "honest-1", "honest-2", "invented-149"} <= names
        assert "invented-0" not in names
        assert told.ByteSize() < 1.1 * workers._MOST_BYTES
        assert {each.id for each in store.workers()} == names
        for remembered in (known._heard_at, known._stored_at, known._principals, known._sizes):
            assert remembered.keys() == names


async def test_a_worker_that_was_forgotten_is_known_again_with_its_next_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_MOST_BYTES", 1_000)
    async with make_service() as core:
        for name in ("w1", "w2", "w3", "w4", "w5", "w1"):
            await claim(core, worker(name))
        told = await core.optimizer.GetCapabilities(jobs_pb2.GetCapabilitiesRequest(), None)
        names = [each.worker_id for each in told.workers]
        assert names[0] == "w1"
        assert 1 < len(names) < 5


async def test_a_worker_may_not_say_more_of_its_modules_than_fits() -> None:
    said = worker()
    said.allowed_modules.extend(["m" * 250] * 300)
    async with make_service() as core:
        with pytest.raises(ServiceError, match="at most 65536 characters together") as refused:
            await core.workers.Claim(workers_pb2.ClaimRequest(worker=said), None)
        assert refused.value.code is Code.INVALID_REQUEST
