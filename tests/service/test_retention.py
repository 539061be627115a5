"""What is forgotten when it was kept long enough, and what is not."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import grpc
import pytest
from torch import nn
from torch.fx import symbolic_trace

from fxlib import wire
from fxlib.v1 import jobs_pb2
from fxlib_service.blobs.base import BlobStore
from fxlib_service.core import Core
from fxlib_service.errors import Code, ServiceError
from fxlib_service.retention import Forgotten, Retention
from tests.service.client import running
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.memory_job_store import MemoryJobStore
from tests.service.support import (
    answer,
    eventually,
    fetch,
    get,
    graph_bytes,
    make_service,
    put,
    ref,
    request,
    states,
    submit,
    work,
)


def retention(core: Core, blobs: BlobStore, *, keep_s: float = -1.0, spare_s: float = -1.0) -> Retention:
    """By default, one that keeps nothing: the last moment is long ago."""
    return Retention(core.ledger, blobs, keep_s=keep_s, spare_s=spare_s, count=core.metrics.forgotten)


def there(blobs: BlobStore, *data: bytes) -> list[bool]:
    return [blobs.partial_size(ref(each).sha256) == 0 and blobs.size(ref(each).sha256) is not None for each in data]


async def test_a_finished_job_goes_and_its_blobs_with_it() -> None:
    blobs = MemoryBlobStore()
    async with make_service(MemoryJobStore(), blobs) as core:
        await submit(core)
        job_id = await work(core)
        assert await retention(core, blobs, keep_s=60.0).sweep() == Forgotten(jobs=0, blobs=0)
        assert states([await get(core, job_id)]) == ["succeeded"]
        assert await retention(core, blobs).sweep() == Forgotten(jobs=1, blobs=1)
        assert await core.ledger.read(core.ledger.store.get, job_id) is None
        assert there(blobs, graph_bytes()) == [False]


async def test_what_jobs_still_name_stays_weights_and_answers_included() -> None:
    encoded = wire.encode(symbolic_trace(nn.Linear(3, 3)), weights=True)
    graph, rewritten, stray = wire.serialize(encoded.graph), graph_bytes(5), b"nobody's"
    weights = list(encoded.blobs.values())
    assert weights
    blobs = MemoryBlobStore()
    async with make_service(MemoryJobStore(), blobs, graphs=[*weights, graph, rewritten, stray]) as core:
        result = answer()
        result.graph.CopyFrom(ref(rewritten))
        await submit(core, request(fresh=True))
        await work(core, result)
        await submit(core, request(graph=graph, fresh=True))
        found = await retention(core, blobs, keep_s=-1.0).sweep()
        assert found.jobs == 1
        assert there(blobs, graph, *weights) == [True] * (1 + len(weights))
        assert there(blobs, rewritten, stray) == [False, False]
        await work(core, answer(reason="NOT_FASTER"))
        assert (await retention(core, blobs).sweep()).jobs == 1
        assert there(blobs, graph, *weights) == [False] * (1 + len(weights))


class FailingStore(MemoryBlobStore):
    """Fails, as a disk or a bucket may, while it is told to."""

    failing = False

    def read(self, sha256: str, *, offset: int, length: int) -> bytes:
        if self.failing:
            raise ServiceError(Code.STORAGE_UNAVAILABLE, retry_after_s=1.0)
        return super().read(sha256, offset=offset, length=length)


async def test_what_a_graph_names_that_cannot_be_read_now_stays() -> None:
    encoded = wire.encode(symbolic_trace(nn.Linear(3, 3)), weights=True)
    graph, weights = wire.serialize(encoded.graph), list(encoded.blobs.values())
    blobs = FailingStore()
    async with make_service(MemoryJobStore(), blobs, graphs=[*weights, graph]) as core:
        await submit(core, request(graph=graph))
        blobs.failing = True
        with pytest.raises(ServiceError) as caught:
            await retention(core, blobs).sweep()
        assert caught.value.code is Code.STORAGE_UNAVAILABLE
        assert there(blobs, graph, *weights) == [True] * (1 + len(weights))
        blobs.failing = False
        assert (await retention(core, blobs).sweep()).blobs == 1  # the usual graph, which no job names
        assert there(blobs, graph, *weights) == [True] * (1 + len(weights))


async def test_an_answer_whose_graph_is_gone_is_not_given_again() -> None:
    rewritten = graph_bytes(5)
    blobs = MemoryBlobStore()
    async with make_service(MemoryJobStore(), blobs, graphs=[rewritten]) as core:
        result = answer()
        result.graph.CopyFrom(ref(rewritten))
        await submit(core)
        await work(core, result)
        assert (await submit(core)).cached
        assert blobs.delete(ref(rewritten).sha256, older_than_s=-1.0)
        assert states([await submit(core)]) == ["queued"]


async def test_a_blob_that_was_asked_for_has_a_whole_term_to_be_named() -> None:
    blobs = MemoryBlobStore()
    async with make_service(MemoryJobStore(), blobs) as core:
        await put(core, b"to be named soon")
        assert await retention(core, blobs, keep_s=0.0, spare_s=60.0).sweep() == Forgotten(jobs=0, blobs=0)
        assert there(blobs, b"to be named soon", graph_bytes()) == [True, True]


def blob_file(data: Path, content: bytes) -> Path:
    name = hashlib.sha256(content).hexdigest()
    return data / "blobs" / name[:2] / name


@pytest.mark.slow
def test_a_service_that_starts_again_forgets_what_was_kept_long_enough(tmp_path: Path) -> None:
    data, waiting, stray = tmp_path / "data", graph_bytes(7), b"nobody's"
    with running(data) as (process, client):
        for content in (graph_bytes(), waiting, stray):
            client.put(content)
        done = client.submit()
        lease = client.claim()
        assert lease is not None
        client.complete(lease)
        queued = client.submit(graph=waiting)
        assert process.stop() == 0
    for content in (graph_bytes(), waiting, stray):
        os.utime(blob_file(data, content), (1.0, 1.0))
    time.sleep(1.0)
    with running(data, "--keep-days", "0") as (_, client):
        assert states([client.get(done.id)]) == ["succeeded"]  # and it is kept for ever
    with running(data, "--keep-days", "0.00001") as (process, client):
        for _ in eventually():
            shown = fetch(f"http://{process.metrics}/metrics")
            if "fxlib_blobs_deleted_total 2.0" in shown:
                break
        with pytest.raises(grpc.RpcError, match="no job"):
            client.get(done.id)
        assert states([client.get(queued.id)]) == ["queued"]
        assert [blob_file(data, each).exists() for each in (graph_bytes(), waiting, stray)] == [False, True, False]
        assert "fxlib_jobs_forgotten_total 1.0" in shown
        assert "fxlib_blobs_deleted_total 2.0" in shown
        assert client.jobs.ListJobs(jobs_pb2.ListJobsRequest(), timeout=60).jobs[0].id == queued.id
