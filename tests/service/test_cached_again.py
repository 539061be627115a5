"""A request that was answered before takes a short way; whatever has changed since is seen on it, too."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_service import submit
from fxlib_service.submit import Submit
from tests.service.principals import bearer
from tests.service.support import answer, graph_bytes, ref, request
from tests.service.test_roles import Guarded, guarded, reason

pytestmark = pytest.mark.slow

ASKED, ANSWERED = graph_bytes(3), graph_bytes(4)


@asynccontextmanager
async def answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "", *, whole_s: float = 0.0
) -> AsyncIterator[tuple[Any, list[bool]]]:
    """A service that has answered `ads` twice; a list says for each request whether it took the short way."""
    monkeypatch.setattr(submit, "_WHOLE_S", whole_s)
    short = list[bool]()
    way = Submit._accept_again

    async def noted(self: Submit, *args: Any) -> Any:
        found = await way(self, *args)
        short.append(found[0] is not None)
        return found

    monkeypatch.setattr(Submit, "_accept_again", noted)
    async with guarded(folder, more) as service:
        await measure(service)
        for _ in range(2):
            assert (await ask(service)).cached
        assert short == [False, False, True]
        short.clear()
        yield service, short


async def measure(service: Guarded, gain: float = 0.5) -> None:
    job = await service.submit("ads", ASKED, fresh=True)
    lease = await service.claim()
    await service.put("worker", ANSWERED)
    result = answer(gain=gain)
    result.graph.CopyFrom(ref(ANSWERED))
    done = workers_pb2.CompleteRequest(job_id=job.id, token=lease.token, result=result)
    await service.workers.Complete(done, metadata=bearer("worker"))


async def ask(service: Guarded, who: str = "ads", **options: Any) -> jobs_pb2.Job:
    job: jobs_pb2.Job = (await service.jobs.Optimize(request(graph=ASKED, **options), metadata=bearer(who))).job
    return job


def stored(folder: Path, data: bytes) -> Path:
    [path] = [each for each in folder.rglob(ref(data).sha256) if each.is_file()]
    path.chmod(0o600)
    return path


async def test_the_short_way_gives_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answered(tmp_path, monkeypatch) as (service, short):
        job = await ask(service, name="relaunch", labels={"team": "a"})
        assert (job.cached, job.result.graph, job.name, job.asked_by) == (True, ref(ANSWERED), "relaunch", "ads")
        told = await service.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job.id), metadata=bearer("ads"))
        assert told.job == job
        assert short == [True]


async def test_a_repeated_request_id_is_the_job_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answered(tmp_path, monkeypatch) as (service, short):
        first, again = [await ask(service, request_id="same") for _ in range(2)]
        assert first.id == again.id
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(service, request_id="same", name="other")
        assert reason(caught.value) == "REQUEST_ID_REUSED"
        assert short == [True, True, True]


async def test_a_graph_that_rots_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answered(tmp_path, monkeypatch) as (service, short):
        stored(tmp_path, ASKED).write_bytes(bytes(len(ASKED)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(service)
        assert (reason(caught.value), short) == ("BLOB_MISSING", [False])


async def test_an_answer_whose_graph_rots_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answered(tmp_path, monkeypatch) as (service, short):
        stored(tmp_path, ANSWERED).write_bytes(bytes(len(ANSWERED)))
        assert not (await ask(service)).cached
        assert short == [False]


async def test_what_was_whole_a_moment_ago_is_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answered(tmp_path, monkeypatch, whole_s=600.0) as (service, short):
        stored(tmp_path, ASKED).write_bytes(bytes(len(ASKED)))
        job = await ask(service)
        assert (job.cached, job.result.gain.value, short) == (True, 0.5, [True])
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # what one namespace has is not another one's
            await ask(service, "web")
        assert reason(caught.value) == "BLOB_MISSING"


async def test_a_new_answer_is_given_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answered(tmp_path, monkeypatch, whole_s=600.0) as (service, _):
        await measure(service, gain=0.25)
        job = await ask(service)
        assert (job.cached, job.result.gain.value) == (True, 0.25)


async def test_a_fresh_request_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answered(tmp_path, monkeypatch) as (service, short):
        assert not (await ask(service, fresh=True)).cached
        assert short == [False]


async def test_another_namespace_has_neither_the_graph_nor_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answered(tmp_path, monkeypatch) as (service, short):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(service, "web")
        assert reason(caught.value) == "BLOB_MISSING"
        await service.put("web", ASKED)
        assert not (await ask(service, "web")).cached
        assert short == [False, False]


async def test_a_namespace_that_shares_answers_has_their_graphs_before_it_takes_the_short_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answered(tmp_path, monkeypatch, "share_results = true") as (service, short):
        await service.put("web", ASKED)
        assert [(await ask(service, "web")).cached for _ in range(2)] == [True, True]
        assert short == [False, True]
