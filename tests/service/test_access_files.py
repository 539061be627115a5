"""A policy and a token that change while the service runs: whom they no longer name is out within seconds."""

import asyncio
import itertools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from fxlib.v1 import blobs_pb2, jobs_pb2, workers_pb2
from fxlib_service import followed_files
from fxlib_service.config import Address, Config
from fxlib_service.followed_files import AccessFiles
from fxlib_service.server import Server
from tests.service.client import running
from tests.service.principals import bearer, write_policy
from tests.service.support import eventually, graph_bytes, ref, states, worker
from tests.service.test_roles import Guarded, guarded, reason

pytestmark = pytest.mark.slow

SOON_S = 10.0
_LIST = jobs_pb2.ListJobsRequest()


async def _eventually(told: Callable[[], Awaitable[object]], wanted: object) -> None:
    ends = time.monotonic() + SOON_S
    while (found := await told()) != wanted:
        assert time.monotonic() < ends, f"still {found}"
        await asyncio.sleep(0.1)


async def _listing(service: Guarded, who: str) -> str:
    try:
        await service.jobs.ListJobs(_LIST, metadata=bearer(who))
    except grpc.aio.AioRpcError as error:
        return reason(error)
    return "ok"


def _without(path: Path, name: str) -> None:
    """Take a principal out of a policy file, as an editor does that writes a new file in its place."""
    kept = [each for each in path.read_text().split("\n\n") if f"[principals.{name}]" not in each]
    unfinished = path.with_suffix(".new")
    unfinished.write_text("\n\n".join(kept))
    unfinished.replace(path)


async def test_a_revoked_token_stops_working_and_its_streams_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with guarded(tmp_path) as service:
        job, foreign = await service.submit("ads", fresh=True), await service.submit("web", fresh=True)
        watch = service.jobs.WatchJob(jobs_pb2.WatchJobRequest(job_id=job.id), metadata=bearer("ads"))
        kept = service.jobs.WatchJob(jobs_pb2.WatchJobRequest(job_id=foreign.id), metadata=bearer("web"))
        assert (await watch.read()).event.sequence == (await kept.read()).event.sequence == 1
        _without(tmp_path / "policy.toml", "ads")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(watch.read(), SOON_S)
        assert reason(caught.value) == "UNAUTHENTICATED"
        assert await _listing(service, "ads") == "UNAUTHENTICATED"
        assert await _listing(service, "web") == "ok"
        await service.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=foreign.id), metadata=bearer("web"))
        assert (await asyncio.wait_for(kept.read(), SOON_S)).event.sequence == 2  # another's stream went on
    assert "removed principals.ads; calls ended: 1" in caplog.text
    line = next(json.loads(each.message) for each in caplog.records if '"changed"' in each.message)
    assert line == {"decision": "changed", "added": [], "removed": ["principals.ads"], "changed": [], "ended": 1}
    assert "the-token" not in caplog.text


async def test_a_waiting_claim_of_a_revoked_worker_gets_no_job(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        asked = workers_pb2.ClaimRequest(worker=worker("worker"), wait_s=30)
        claim = service.workers.Claim(asked, metadata=bearer("worker"))
        await asyncio.sleep(0.3)
        _without(tmp_path / "policy.toml", "worker")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(claim, SOON_S)
        assert reason(caught.value) == "UNAUTHENTICATED"
        job = await service.submit("ads", fresh=True)
        assert (await service.claim("worker-2")).job_id == job.id


async def test_an_upload_of_a_revoked_client_ends(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        data = graph_bytes(6)
        upload = service.blobs.Write(metadata=bearer("ads"))
        await upload.write(blobs_pb2.WriteRequest(blob=ref(data), data=data[:10]))
        await asyncio.sleep(0.3)
        _without(tmp_path / "policy.toml", "ads")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(upload, SOON_S)
        assert reason(caught.value) == "UNAUTHENTICATED"


async def test_a_broken_policy_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(tmp_path) as service:
        path = tmp_path / "policy.toml"
        sound = path.read_text()
        path.write_text("[principals.ads]\nrole = 'king'\n")

        async def said() -> int:
            return sum("goes on with what it read before" in each.message for each in caplog.records)

        await _eventually(said, 1)
        assert await _listing(service, "ads") == "ok"
        await asyncio.sleep(1.5)
        assert await said() == 1
        assert "--policy: principals.ads.role: must be one of" in caplog.text
        path.unlink()
        await _eventually(said, 2)
        assert await _listing(service, "ads") == "ok"
        path.write_text(sound)
        _without(path, "ads")
        await _eventually(lambda: _listing(service, "ads"), "UNAUTHENTICATED")


async def test_quotas_and_what_is_shared_change_too(tmp_path: Path) -> None:
    async with guarded(tmp_path) as service:
        await service.submit("ads", fresh=True)
        text = (tmp_path / "policy.toml").read_text()
        (tmp_path / "policy.toml").write_text(f"[quota]\nqueued_jobs = 1\n{text}")

        async def told() -> str:
            try:
                await service.submit("ads", fresh=True)
            except grpc.aio.AioRpcError as error:
                return reason(error)
            return "ok"

        await _eventually(told, "QUEUE_FULL")


async def test_the_owner_s_token_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first-token-of-the-owner")
    file.chmod(0o600)
    here = Address(host="127.0.0.1", port=0)
    server = Server(Config(data=tmp_path / "data", listen=here, metrics=here, token_file=file, tcp_only=True))
    try:
        listen, _ = await server.start()
        async with grpc.aio.insecure_channel(str(listen)) as channel:
            opened: Any = channel
            call = opened.unary_unary("/fxlib.v1.OptimizerService/ListJobs")

            async def told(token: str) -> str:
                try:
                    await call(b"", metadata=(("authorization", f"Bearer {token}"),))
                except grpc.aio.AioRpcError as error:
                    return reason(error)
                return "ok"

            assert await told("first-token-of-the-owner") == "ok"
            file.write_text("")  # an empty file is no token: nobody is locked out, and nobody let in
            await asyncio.sleep(1.5)
            assert (await told("first-token-of-the-owner"), await told("")) == ("ok", "UNAUTHENTICATED")
            file.write_text("second-token-of-the-owner")
            await _eventually(lambda: told("second-token-of-the-owner"), "ok")
            assert await told("first-token-of-the-owner") == "UNAUTHENTICATED"
    finally:
        await server.stop()


async def test_a_file_that_is_still_being_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, read_at = itertools.count(), list[int]()
    files = AccessFiles(Config(data=tmp_path, policy=write_policy(tmp_path)))
    monkeypatch.setattr(followed_files, "_LOOK_S", 0.01)
    monkeypatch.setattr(followed_files, "_state", lambda _: (min(next(looks), 20),))  # it is written to for 20 looks

    def read() -> int:
        read_at.append(next(looks))
        return 0

    following = asyncio.create_task(files.follow(read))
    await asyncio.sleep(1.0)
    following.cancel()
    assert len(read_at) == 1
    assert read_at[0] > 21


async def test_a_token_is_revoked_though_all_threads_of_asyncio_wait_for_blobs(tmp_path: Path) -> None:
    asyncio.get_running_loop().set_default_executor(threads := ThreadPoolExecutor(1))
    over = threading.Event()
    async with guarded(tmp_path) as service:
        waits = threads.submit(over.wait, 60)
        _without(tmp_path / "policy.toml", "ads")
        await _eventually(lambda: _listing(service, "ads"), "UNAUTHENTICATED")
        assert not waits.done()
        over.set()


def test_a_signal_has_a_real_service_read_its_files_at_once(tmp_path: Path) -> None:
    path, log = write_policy(tmp_path), tmp_path / "audit.log"
    with running(tmp_path / "data", "--policy", str(path), "--audit-log", str(log)) as (service, client):
        os.kill(service.pid, signal.SIGHUP)
        assert any('"decision": "changed"' in log.read_text() for _ in eventually(SOON_S))
        client.put(graph_bytes())
        assert states([client.submit()]) == ["queued"]
        assert service.stop() == 0
