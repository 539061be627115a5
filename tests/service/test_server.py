"""A service on real sockets, and what its metrics address answers, path by path."""

import asyncio
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partialmethod
from http.client import HTTPResponse
from pathlib import Path
from socketserver import BaseServer
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from typing_extensions import override

from fxlib.errors import FxlibError
from fxlib.v1 import blobs_pb2, blobs_pb2_grpc, jobs_pb2, jobs_pb2_grpc, workers_pb2, workers_pb2_grpc
from fxlib_service import server as server_module
from fxlib_service.config import MIB, Address, Config, Limits
from fxlib_service.errors import Code, ServiceError
from fxlib_service.server import SERVICES, Server, metrics_app, pages
from fxlib_service.servicers import workers as worker_servicer
from fxlib_service.servicers.context import Context, seconds_left
from fxlib_service.stores.base import Stats
from tests.service.memory_job_store import MemoryJobStore
from tests.service.support import Process, eventually, fetch, graph_bytes, local, make_service, ref, request, worker

pytestmark = pytest.mark.slow

ANYWHERE = Address(host="127.0.0.1", port=0)
UNARY = [
    "OptimizerService/Optimize",
    "OptimizerService/GetJob",
    "OptimizerService/ListJobs",
    "OptimizerService/CancelJob",
    "OptimizerService/RetryJob",
    "OptimizerService/ReportLive",
    "BlobService/FindMissing",
    "BlobService/QueryWrite",
    "WorkerService/Heartbeat",
    "WorkerService/Report",
    "WorkerService/Complete",
    "WorkerService/Release",
]


class Client:
    """Stubs over one channel."""

    def __init__(self, channel: grpc.aio.Channel, metrics: str) -> None:
        self.channel: Any = channel
        self.metrics = metrics
        self.jobs: Any = jobs_pb2_grpc.OptimizerServiceStub(channel)
        self.blobs: Any = blobs_pb2_grpc.BlobServiceStub(channel)
        self.workers: Any = workers_pb2_grpc.WorkerServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    async def submit(self) -> jobs_pb2.Job:
        data = graph_bytes()
        await self.blobs.Write(iter([blobs_pb2.WriteRequest(blob=ref(data), data=data)]))
        job: jobs_pb2.Job = (await self.jobs.Optimize(request(fresh=True))).job
        return job

    async def raw(self, method: str, data: bytes) -> grpc.StatusCode:
        """Send bytes as a request, and return the status."""
        call = self.channel.unary_unary(f"/fxlib.v1.{method}")
        try:
            await call(data, timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@asynccontextmanager
async def serving(data: Path, **options: Any) -> AsyncIterator[tuple[Client, Server]]:
    server = Server(Config(data=data, listen=ANYWHERE, metrics=ANYWHERE, shutdown_grace_s=0.5, **options))
    try:
        listen, metrics = await server.start()
        async with grpc.aio.insecure_channel(local(listen)) as channel:
            yield Client(channel, f"http://{metrics}/metrics"), server
    finally:
        await server.stop()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with serving(tmp_path / "data", limits=Limits(message_bytes=MIB, call_timeout_s=20.0)) as (client, _):
        yield client


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def details(error: grpc.aio.AioRpcError, kind: type[Message]) -> Any:
    metadata: Any = error.trailing_metadata()
    for each in status_pb2.Status.FromString(dict(metadata)["grpc-status-details-bin"]).details:
        message = kind()
        if each.Unpack(message):
            return message
    raise AssertionError(f"no {kind.__name__}")


@pytest.mark.parametrize("name", ["", *SERVICES])
async def test_health_is_told_of_each_service(client: Client, name: str) -> None:
    response = await client.health.Check(health_pb2.HealthCheckRequest(service=name))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_event_loop_never_sleeps_long(client: Client) -> None:
    """Where gRPC's own wake-up is lost, an answer waits for the next timer."""
    await client.channel.channel_ready()
    loop: Any = asyncio.get_running_loop()
    sleeps = []
    for _ in range(9):
        await asyncio.sleep(0.013)
        sleeps.append(min(each.when() - loop.time() for each in loop._scheduled if not each.cancelled()))
    assert sorted(sleeps)[4] < 0.1


async def test_reflection_lists_the_services(client: Client) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in stub.ServerReflectionInfo(iter([ask])):
        assert set(SERVICES) <= {each.name for each in response.list_services_response.service}


async def test_a_job_goes_through(client: Client) -> None:
    job = await client.submit()
    watching = client.jobs.WatchJob(jobs_pb2.WatchJobRequest(job_id=job.id))
    lease = (await client.workers.Claim(workers_pb2.ClaimRequest(worker=worker(), wait_s=5))).lease
    result = jobs_pb2.JobResult(decision=jobs_pb2.DECISION_KEEP_ORIGINAL, reason_code="NOT_FASTER", reason="why")
    await client.workers.Complete(workers_pb2.CompleteRequest(job_id=job.id, token=lease.token, result=result))
    assert [response.event.sequence async for response in watching] == [1, 2, 3]
    ended = (await client.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job.id))).job
    assert ended.result == result


async def test_a_refusal_carries_code_and_fields(client: Client) -> None:
    error = await failure(client.jobs.Optimize(request(request_id="", namespace="..")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    info = details(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "fxlib")
    fields = details(error, error_details_pb2.BadRequest).field_violations
    assert [each.field for each in fields] == ["request_id", "namespace"]


@pytest.mark.parametrize("method", UNARY)
async def test_a_message_that_cannot_be_read_is_refused(client: Client, method: str) -> None:
    assert await client.raw(method, b"\xff\xff\xff\xff garbage") is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_chunk_that_cannot_be_read_is_refused(client: Client) -> None:
    call = client.channel.stream_unary("/fxlib.v1.BlobService/Write")
    assert (await failure(call(iter([b"\xff\xff"])))).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_is_too_large_is_refused(client: Client) -> None:
    assert await client.raw("OptimizerService/Optimize", bytes(2 * MIB)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await client.submit()).id


async def test_an_unknown_method_is_unimplemented(client: Client) -> None:
    assert await client.raw("OptimizerService/Delete", b"") is grpc.StatusCode.UNIMPLEMENTED


async def test_whatever_bytes_are_sent_the_service_answers_in_its_own_words(tmp_path: Path) -> None:
    ours = {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
    async with serving(tmp_path / "data") as (client, _):
        valid = request().SerializeToString()
        for data in _mutations(valid):
            for method in UNARY:
                assert await client.raw(method, data) in ours, (method, data)


def _mutations(valid: bytes) -> Iterator[bytes]:
    found: list[bytes] = []

    @settings(max_examples=25, database=None)
    @given(st.integers(0, len(valid) - 1), st.integers(0, 255), st.integers(0, len(valid)))
    def collect(place: int, value: int, length: int) -> None:
        changed = bytearray(valid)
        changed[place] = value
        found.append(bytes(changed[: max(length, 1)]))

    collect()
    yield from [b"", b"\x00", *found]


def _broken(_: str) -> None:
    raise RuntimeError("secret")


async def test_a_failure_of_the_service_itself_tells_nothing_of_its_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path / "data") as (client, server):
        assert server._core is not None
        monkeypatch.setattr(server._core.ledger.store, "get", _broken)
        error = await failure(client.jobs.GetJob(jobs_pb2.GetJobRequest(job_id="j")))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(error.details())
        assert details(error, error_details_pb2.ErrorInfo).reason == "INTERNAL"


async def test_a_claim_waits_less_than_the_caller_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, waits = list[float](), list[float]()

    def left_to_caller(context: Context, otherwise: float) -> float:
        left.append(seconds_left(context, otherwise))
        return left[-1]

    async def noting(_: object, *, wait_s: float, principal: str) -> None:
        waits.append(wait_s)

    async with serving(tmp_path / "data") as (client, server):
        assert server._core is not None
        monkeypatch.setattr(worker_servicer, "seconds_left", left_to_caller)
        monkeypatch.setattr(server._core.dispatcher, "claim", noting)
        await client.workers.Claim(workers_pb2.ClaimRequest(worker=worker(), wait_s=50), timeout=20)
        await client.workers.Claim(workers_pb2.ClaimRequest(worker=worker(), wait_s=1), timeout=20)
    assert left[0] <= 20.1  # gRPC sends a timeout of this size in tenths of a second, rounded up
    assert waits == [left[0] - 0.5, 1.0]


async def test_a_call_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", limits=Limits(call_timeout_s=0.2)) as (client, _):
        error = await failure(client.workers.Claim(workers_pb2.ClaimRequest(worker=worker(), wait_s=50)))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details(error, error_details_pb2.ErrorInfo).reason == "CALL_TIMEOUT"


async def test_a_client_that_leaves_harms_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (client, server):
        assert server._core is not None
        job = await client.submit()
        watching = client.jobs.WatchJob(jobs_pb2.WatchJobRequest(job_id=job.id))
        await watching.read()
        watching.cancel()
        async with asyncio.timeout(60):
            while server._core.broker.watchers:  # noqa: ASYNC110  # nothing tells
                await asyncio.sleep(0.01)
        assert (await client.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job.id))).job.state == jobs_pb2.JOB_STATE_QUEUED


async def test_calls_are_counted_by_method_and_status(client: Client) -> None:
    await client.submit()
    await failure(client.jobs.GetJob(jobs_pb2.GetJobRequest(job_id="none")))
    text = await asyncio.to_thread(fetch, client.metrics)
    assert 'fxlib_rpc_seconds_count{code="OK",method="OptimizerService/Optimize"} 1.0' in text
    assert 'fxlib_rpc_seconds_count{code="NOT_FOUND",method="OptimizerService/GetJob"} 1.0' in text
    assert 'fxlib_jobs{state="queued"} 1.0' in text


async def test_an_end_in_order_tells_everybody(tmp_path: Path) -> None:
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE, shutdown_grace_s=500.0))
    listen, metrics = await server.start()
    async with grpc.aio.insecure_channel(local(listen)) as channel:
        client = Client(channel, str(metrics))
        await client.workers.Claim(workers_pb2.ClaimRequest(worker=worker(torch_version="2.0")))
        job = await client.submit()
        watching = client.jobs.WatchJob(jobs_pb2.WatchJobRequest(job_id=job.id))
        await watching.read()
        claiming = asyncio.ensure_future(
            client.workers.Claim(workers_pb2.ClaimRequest(worker=worker(torch_version="2.0"), wait_s=50))
        )
        assert server._core is not None
        while "2.0" not in server._core.dispatcher._wakeups:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):  # and waits for nobody's end
            await server.stop()
        assert not (await claiming).HasField("lease")
        error = await failure(watching.read())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1


async def test_its_end_does_not_wait_until_the_server_of_pages_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom = partialmethod(BaseServer.serve_forever, poll_interval=40.0)
    monkeypatch.setattr(BaseServer, "serve_forever", seldom)
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE))
    await server.start()
    async with asyncio.timeout(20):
        await server.stop()


async def test_a_task_that_has_failed_keeps_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_wake", AsyncMock(side_effect=RuntimeError("no reason")))
    server = Server(Config(data=tmp_path / "data", listen=ANYWHERE, metrics=ANYWHERE))
    await server.start()
    await server.stop()
    await Server(Config(data=tmp_path / "data")).stop()  # which has to lock the folder


async def test_one_service_to_a_data_folder(tmp_path: Path) -> None:
    async with serving(tmp_path / "data"):
        with pytest.raises(FxlibError, match="another service uses"):
            Server(Config(data=tmp_path / "data"))
    async with serving(tmp_path / "data"):
        pass


@pytest.mark.parametrize("named", ["sqlite:///{}/one.sqlite", "sqlite+pysqlite:///{}/one.sqlite", "sqlite:///{}/link"])
async def test_one_service_to_an_sqlite_database(tmp_path: Path, named: str) -> None:
    def with_(folder: str) -> Config:
        return Config(data=tmp_path / folder, database_url=named.format(tmp_path))

    (tmp_path / "link").symlink_to(tmp_path / "one.sqlite")
    first = Server(Config(data=tmp_path / "a", database_url=f"sqlite:///{tmp_path}/one.sqlite"))
    for _ in range(2):
        with pytest.raises(FxlibError, match=r"--database: another service uses .*(one\.sqlite|link)"):
            Server(with_("b"))
    await first.stop()
    await Server(with_("b")).stop()


async def test_one_service_to_an_address(tmp_path: Path) -> None:
    first = Server(Config(data=tmp_path / "a", listen=ANYWHERE, metrics=ANYWHERE))
    listen, metrics = await first.start()
    for pair in ((listen, ANYWHERE), (ANYWHERE, metrics)):
        second = Server(Config(data=tmp_path / "b", listen=pair[0], metrics=pair[1]))
        with pytest.raises(FxlibError, match="cannot listen on"):
            await second.start()
        await second.stop()
    await first.stop()


def ask(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    asked = urllib.request.Request(f"http://{address}{path}", method=method)  # our own address
    try:
        response: HTTPResponse
        with urllib.request.urlopen(asked, timeout=60) as response:  # noqa: S310
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_and_metrics_have_paths_of_their_own_and_nothing_else_is_there(tmp_path: Path) -> None:
    service = Process(tmp_path)
    try:
        assert ask(service.metrics, "/healthz") == (200, "ok\n")
        assert ask(service.metrics, "/readyz") == (200, "ok\n")
        status, text = ask(service.metrics, "/metrics")
        assert (status, "fxlib_data_free_bytes" in text) == (200, True)
        for path in ("/", "/metrics/", "/metrics/../etc/passwd", "/healthz%00", "/jobs"):
            assert ask(service.metrics, path)[0] == 404
        for method in ("POST", "PUT", "DELETE"):
            assert ask(service.metrics, "/healthz", method)[0] == 405
    finally:
        service.kill()


@pytest.mark.parametrize(
    "path, told", [("/healthz", ("200 OK", b"ok\n")), ("/readyz", ("503 Service Unavailable", b"not ready: because\n"))]
)
def test_a_service_that_is_not_ready_lives_and_says_why(path: str, told: tuple[str, bytes]) -> None:
    app, statuses = pages(metrics_app(CollectorRegistry(), None), lambda: "because"), list[str]()
    body = app({"PATH_INFO": path, "REQUEST_METHOD": "GET"}, lambda status, headers: statuses.append(status))
    assert (*statuses, b"".join(body)) == told


class Away(MemoryJobStore):
    """A store that refuses while it `refuses`, and says nothing until `back`."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses, self.back = False, threading.Event()
        self.back.set()

    @override
    def ping(self) -> None:
        self.back.wait(60)
        if self.refuses:
            raise ServiceError(Code.STORAGE_UNAVAILABLE, "the database is away")

    @override
    def stats(self) -> Stats:
        self.ping()
        return super().stats()


async def test_a_database_that_is_away_is_told_at_once_and_its_return_too() -> None:
    store = Away()
    async with make_service(store) as core:

        def told() -> tuple[float | None, float | None, bool]:
            gauges = (core.registry.get_sample_value(f"fxlib_{name}") for name in ("database_up", "queue_depth"))
            up, depth = gauges
            return up, depth, core.probe.answers()

        assert await asyncio.to_thread(told) == (1.0, 0.0, True)
        store.refuses = True
        assert await asyncio.to_thread(told) == (0.0, None, False)
        store.refuses = False
        store.back.clear()  # a network that drops everything
        await asyncio.to_thread(told)
        began = time.monotonic()
        assert await asyncio.to_thread(told) == (0.0, None, False)
        assert time.monotonic() - began < 0.5, "nobody waits behind a question that is stuck"
        store.back.set()
        for _ in eventually():
            if await asyncio.to_thread(told) == (1.0, 0.0, True):
                break
        else:
            pytest.fail("the database is back, and is not asked again")
