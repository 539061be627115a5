"""Namespaces share a service, and neither blobs nor answers, unless the policy says so."""

from pathlib import Path

import grpc
import pytest

from fxlib.v1 import blobs_pb2, jobs_pb2, workers_pb2
from tests.service.principals import bearer
from tests.service.support import answer, graph_bytes, ref, request
from tests.service.test_retention import blob_file
from tests.service.test_roles import Guarded, guarded, reason

pytestmark = pytest.mark.slow

DATA = b"weights of the web" * 100


async def refusal(call: object) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return reason(caught.value)


async def missing(service: Guarded, who: str, data: bytes) -> bool:
    asked = blobs_pb2.FindMissingRequest(blobs=[ref(data)])
    return bool((await service.blobs.FindMissing(asked, metadata=bearer(who))).missing)


async def read(service: Guarded, who: str, data: bytes) -> bytes:
    call = service.blobs.Read(blobs_pb2.ReadRequest(blob=ref(data)), metadata=bearer(who))
    return b"".join([chunk.data async for chunk in call])


async def write(service: Guarded, who: str, data: bytes, sent: bytes) -> int:
    chunk = blobs_pb2.WriteRequest(blob=ref(data), data=sent)
    committed: int = (await service.blobs.Write(iter([chunk]), metadata=bearer(who))).committed_bytes
    return committed


async def kept(service: Guarded, who: str, data: bytes) -> int:
    asked = blobs_pb2.QueryWriteRequest(blob=ref(data))
    committed: int = (await service.blobs.QueryWrite(asked, metadata=bearer(who))).committed_bytes
    return committed


async def complete(service: Guarded, result: jobs_pb2.JobResult | None = None) -> str:
    lease = await service.claim()
    done = workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token, result=result or answer())
    await service.workers.Complete(done, metadata=bearer("worker"))
    return lease.job_id


async def test_another_s_blob_does_not_exist_until_one_has_sent_it(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        await service.put("web", DATA)
        assert not await missing(service, "web", DATA)
        assert await missing(service, "ads", DATA)
        assert await kept(service, "ads", DATA) == 0
        assert await refusal(_reading(service, "ads")) == "BLOB_NOT_FOUND"
        assert await write(service, "ads", DATA, b"") == 0  # to name it is not to have it
        assert await missing(service, "ads", DATA)
        await service.put("ads", DATA)
        assert await read(service, "ads", DATA) == DATA
        assert await read(service, "web", DATA) == DATA


async def _reading(service: Guarded, who: str) -> None:
    await read(service, who, DATA)


async def test_a_job_cannot_name_another_s_blobs(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        await service.put("web", graph_bytes(6))
        asked = request(graph=graph_bytes(6))
        assert await refusal(service.jobs.Optimize(asked, metadata=bearer("ads"))) == "BLOB_MISSING"


async def test_nobody_spoils_or_sees_another_s_unfinished_upload(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        assert await write(service, "web", DATA, DATA[:100]) == 100
        assert await kept(service, "ads", DATA) == 0
        wrong = bytes(len(DATA))
        assert await refusal(_writing(service, wrong)) == "BLOB_CORRUPT"
        assert await kept(service, "web", DATA) == 100


async def test_a_blob_that_was_damaged_or_lost_is_sent_anew_in_parts(tmp_path: Path) -> None:
    async with guarded(tmp_path, f"[quota]\nstored_bytes = {len(DATA) + 100}") as service:
        for spoil in (
            lambda path: path.write_bytes(bytes(len(DATA))),
            lambda path: path.write_bytes(DATA[:9]),
            Path.unlink,
        ):
            await service.put("web", DATA)
            spoil(blob_file(tmp_path / "data", DATA))
            assert await write(service, "web", DATA, DATA[:100]) == 100
            assert await kept(service, "web", DATA) == 100
            rest = blobs_pb2.WriteRequest(blob=ref(DATA), offset=100, data=DATA[100:])
            await service.blobs.Write(iter([rest]), metadata=bearer("web"))
            assert await read(service, "web", DATA) == DATA


async def _writing(service: Guarded, wrong: bytes) -> None:
    await write(service, "ads", DATA, wrong)


async def test_an_answer_is_kept_for_its_own_namespace(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        await service.put("worker", graph_bytes())
        first = await service.submit("web")
        assert await complete(service) == first.id
        again, other = await service.submit("web"), await service.submit("ads")
        assert again.cached
        assert other.state == jobs_pb2.JOB_STATE_QUEUED


async def test_two_namespaces_that_ask_the_same_at_the_same_time_are_answered_each_by_a_worker(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        await service.put("worker", graph_bytes())
        first, second = await service.submit("web"), await service.submit("ads")
        assert {await complete(service), await complete(service)} == {first.id, second.id}


async def test_a_policy_may_share_answers_and_then_their_graphs_are_everybody_s(tmp_path: Path) -> None:
    async with guarded(tmp_path, "share_results = true") as service:
        graph = graph_bytes(7)
        await service.put("worker", graph)
        result = answer()
        result.graph.CopyFrom(ref(graph))
        await service.submit("web")
        await complete(service, result)
        shared = await service.submit("ads")
        assert shared.cached
        assert shared.result.graph == ref(graph)
        assert await read(service, "ads", graph) == graph
        assert await read(service, "web", graph) == graph


async def test_the_rewritten_graph_is_its_namespace_s_and_no_other_s(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        graph = graph_bytes(8)
        await service.put("worker", graph)
        result = answer()
        result.graph.CopyFrom(ref(graph))
        await service.submit("web")
        await complete(service, result)
        assert await read(service, "web", graph) == graph
        assert await missing(service, "ads", graph)


async def test_a_worker_cannot_answer_under_another_s_lease(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        job = await service.submit("ads", fresh=True)
        lease = await service.claim("worker")
        done = workers_pb2.CompleteRequest(job_id=job.id, token=lease.token, result=answer())
        assert await refusal(service.workers.Complete(done, metadata=bearer("worker-2"))) == "LEASE_LOST"
        beat = workers_pb2.HeartbeatRequest(job_id=job.id, token=lease.token)
        assert await refusal(service.workers.Heartbeat(beat, metadata=bearer("worker-2"))) == "LEASE_LOST"
        await service.workers.Complete(done, metadata=bearer("worker"))


async def test_a_worker_without_the_lease_gives_a_namespace_no_graph(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        graph = graph_bytes(9)
        await service.put("web", graph)
        job = await service.submit("ads", fresh=True)
        result = answer()
        result.graph.CopyFrom(ref(graph))
        forged = workers_pb2.CompleteRequest(job_id=job.id, token="guessed", result=result)
        assert await refusal(service.workers.Complete(forged, metadata=bearer("worker"))) == "LEASE_LOST"
        assert await missing(service, "ads", graph)
