"""What is on its way through the service is bounded: who is over a limit is told which, and when to come back."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from fxlib.errors import OptionError
from fxlib.v1 import blobs_pb2, jobs_pb2
from fxlib_service import in_flight
from fxlib_service.config import MIB, Limits
from fxlib_service.core import Core
from fxlib_service.errors import Code, ServiceError
from fxlib_service.fair_budget import FairBudget
from fxlib_service.in_flight import InFlight
from fxlib_service.server import Server
from fxlib_service.servicers.optimizer import OptimizerServicer
from fxlib_service.submit import Submit
from tests.service.principals import bearer
from tests.service.support import fetch, ref, request
from tests.service.test_roles import guarded, reason
from tests.service.test_server import details, failure, serving

pytestmark = pytest.mark.slow

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


def core_of(server: Server) -> Core:
    assert server._core is not None
    return server._core


def busy(error: grpc.aio.AioRpcError, limit: str) -> float:
    """Return the seconds after which to come back, of an error that says that this limit is reached."""
    assert error.code() is FULL, error
    info = details(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.metadata["limit"]) == ("SERVICE_BUSY", limit)
    assert f"no room for more {limit}" in str(error.details())
    seconds: float = details(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() / 1e3
    return seconds


class Handled:
    """Stands in for a method that keeps its requests for as long as the test wants, and counts their bytes."""

    def __init__(self) -> None:
        self.bytes = self.most = self.calls = 0
        self.go_on = asyncio.Event()

    async def __call__(self, asked: jobs_pb2.OptimizeRequest, _: object) -> Any:
        self.bytes += asked.ByteSize()
        self.calls += 1
        self.most = max(self.most, self.bytes)
        await self.go_on.wait()
        self.bytes -= asked.ByteSize()
        return jobs_pb2.OptimizeResponse()


async def empty(budget: FairBudget) -> None:
    """Wait until nothing of a budget is held."""
    async with asyncio.timeout(60):
        while budget.held:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)


async def failures(calls: Sequence[asyncio.Future[Any]], number: int) -> list[grpc.aio.AioRpcError]:
    """Wait until so many calls have failed, and return how."""
    async with asyncio.timeout(120):
        while sum(call.done() for call in calls) < number:
            await asyncio.wait([call for call in calls if not call.done()], return_when=asyncio.FIRST_COMPLETED)
    return [await failure(call) for call in calls if call.done()]


async def test_requests_that_are_handled_hold_no_more_bytes_than_their_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = Handled()
    monkeypatch.setattr(OptimizerServicer, "Optimize", handled)
    monkeypatch.setattr(in_flight, "_TURN_S", 2.0)
    monkeypatch.setattr(in_flight, "_LINGER_S", 0.01)
    limits = Limits(in_flight_bytes=48 * MIB)
    asked = jobs_pb2.OptimizeRequest(name="x" * 3 * MIB)
    async with serving(tmp_path / "data", limits=limits) as (client, server):
        requests = core_of(server).in_flight.requests
        calls = [asyncio.ensure_future(client.jobs.Optimize(asked)) for _ in range(40)]
        errors = await failures(calls, 39)
        assert handled.calls == 1, "the first one, and the room for the largest that could follow, fill the share"
        assert {busy(error, "bytes of requests") for error in errors} == {2.0}
        handled.go_on.set()
        await asyncio.wait(calls)
        await asyncio.gather(*(client.jobs.Optimize(asked) for _ in range(3)))
        assert handled.most <= requests.total // 2
        await empty(requests)


@pytest.mark.parametrize("asked", [jobs_pb2.ReportLiveRequest(), jobs_pb2.GetJobRequest(), jobs_pb2.OptimizeRequest()])
async def test_who_makes_many_calls_at_once_waits_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    method, handled = type(asked).__name__.removesuffix("Request"), Handled()

    async def answered(_: object, request: Any, *__: object) -> Any:
        await handled(request, None)
        raise ServiceError(Code.JOB_NOT_FOUND)

    if method == "Optimize":  # an answer from the cache takes turns, and what needs a check has turns of its own
        monkeypatch.setattr(Submit, "_accept_again", answered)
    else:
        monkeypatch.setattr(OptimizerServicer, method, answered)
    async with guarded(tmp_path) as service:

        async def call(who: str) -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(service.jobs, method)(
                    request(torch_version="2.13.0") if method == "Optimize" else asked, metadata=bearer(who)
                )
            assert reason(caught.value) == "JOB_NOT_FOUND"

        flood = [asyncio.ensure_future(call("ads")) for _ in range(30)]
        share = in_flight._TURNS // 2
        assert await told(lambda: handled.calls, share) == share
        others = asyncio.ensure_future(call("web"))
        assert await told(lambda: handled.calls, share + 1) == share + 1, "another tenant's turn comes at once"
        await asyncio.sleep(0.3)
        assert handled.calls == share + 1
        handled.go_on.set()
        await asyncio.gather(others, *flood)


async def told(count: Callable[[], int], least: int) -> int:
    """Return a count once it is as large as that."""
    async with asyncio.timeout(60):
        while count() < least:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
    return count()


async def test_a_tenants_large_requests_count_for_a_while_after_their_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "_LINGER_S", 3600.0)
    async with serving(tmp_path / "data", limits=Limits(in_flight_bytes=48 * MIB)) as (client, server):
        requests = core_of(server).in_flight.requests
        asked = jobs_pb2.OptimizeRequest(name="x" * 5 * MIB)
        assert "may have" in str((await failure(client.jobs.Optimize(asked))).details())
        assert requests.held == asked.ByteSize()
        monkeypatch.setattr(in_flight, "_TURN_S", 0.1)
        busy(await failure(client.jobs.Optimize(asked)), "bytes of requests")
        assert requests.held == asked.ByteSize(), "what found no room holds none"


def resident_mib() -> int:
    return psutil.Process().memory_info().rss // MIB


async def test_nothing_of_a_large_request_stays_when_its_call_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(in_flight, "_LINGER_S", 0.01)
    request.addfinalizer(gc.enable)
    async with serving(tmp_path / "data") as (client, _):
        for size, problem in ((5, "may have"), (3, "request_id")):
            asked = jobs_pb2.OptimizeRequest(name="x" * size * MIB)
            for number in range(45):
                if number == 5:
                    gc.collect()
                    gc.disable()  # whatever is part of a cycle stays from now on
                    before = resident_mib()
                assert problem in str((await failure(client.jobs.Optimize(asked))).details())
            assert resident_mib() - before < 40 * size / 2
            gc.enable()


async def test_small_requests_count_for_their_calls_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "_LINGER_S", 3600.0)
    async with serving(tmp_path / "data") as (client, server):
        await client.submit()
        assert core_of(server).in_flight.requests.held == 0


async def test_each_method_has_a_limit_of_its_own_and_names_it(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (client, _):
        error = await failure(client.jobs.GetJob(jobs_pb2.GetJobRequest(job_id="x" * 65536)))
        assert error.code() is FULL
        assert details(error, error_details_pb2.ErrorInfo).reason == "MESSAGE_TOO_LARGE"
        assert error.details() == ("a message of OptimizerService/GetJob may have 65536 bytes, and this one has 65540")
        blobs = [ref(b"%d" % number) for number in range(2_000)]
        found = await client.blobs.FindMissing(blobs_pb2.FindMissingRequest(blobs=blobs))
        assert len(found.missing) == 2_000


async def test_a_message_that_grpc_itself_refuses_is_told_the_limit_too(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (client, server):
        data = bytes(9 * MIB)
        for call in (
            client.jobs.Optimize(jobs_pb2.OptimizeRequest(name="x" * 9 * MIB)),
            client.blobs.Write(iter([blobs_pb2.WriteRequest(blob=ref(data), data=data)])),
        ):
            error = await failure(call)
            assert error.code() is FULL
            assert "larger than max" in str(error.details())
            assert str(8 * MIB) in str(error.details())
        await empty(core_of(server).in_flight.requests)


async def test_health_takes_small_messages_alone(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (client, _):
        error = await failure(client.health.Check(health_pb2.HealthCheckRequest(service="x" * MIB)))
        assert error.code() is FULL
        assert "may have 65536 bytes" in str(error.details())
        watching = client.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_tenant_has_half_of_the_open_calls(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", limits=Limits(calls=4)) as (client, server):
        job = await client.submit()
        asked = jobs_pb2.WatchJobRequest(job_id=job.id)
        watching = [client.jobs.WatchJob(asked) for _ in range(2)]
        for each in watching:
            await each.read()
        error = await failure(client.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job.id)))
        assert busy(error, "calls") == 2.0
        assert (await client.health.Check(health_pb2.HealthCheckRequest())).status == 1
        text = await asyncio.to_thread(fetch, client.metrics)
        assert 'fxlib_calls_refused_total{limit="calls"} 1.0' in text
        assert "fxlib_calls_open 2.0" in text
        watching[0].cancel()
        async with asyncio.timeout(60):
            while core_of(server).in_flight.calls.held > 1:  # noqa: ASYNC110  # nothing tells
                await asyncio.sleep(0.01)
        await client.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job.id))


async def test_calls_that_wait_for_the_store_of_blobs_keep_no_other_calls_waiting() -> None:
    limits, finding = InFlight(Limits()), list[Any]()
    for tenant in ("ads", "web"):
        for _ in range(4):
            finding.append(limits.turn("BlobService/FindMissing", tenant))
            await asyncio.wait_for(finding[-1].__aenter__(), 5)
    async with asyncio.timeout(5), limits.turn("OptimizerService/GetJob", "ads"):
        pass
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), limits.turn("BlobService/FindMissing", "web"):
            pass


async def test_open_uploads_are_few_and_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "_UPLOAD_TURN_S", 2.0)
    go_on = asyncio.Event()

    async def slowly(data: bytes) -> AsyncIterator[blobs_pb2.WriteRequest]:
        yield blobs_pb2.WriteRequest(blob=ref(data), data=data[:10])
        await go_on.wait()
        yield blobs_pb2.WriteRequest(offset=10, data=data[10:])

    async with serving(tmp_path / "data", limits=Limits(in_flight_bytes=96 * MIB)) as (client, server):
        uploads = core_of(server).in_flight.uploads
        data = [b"%d" % number * 1000 for number in range(30)]
        calls = [asyncio.ensure_future(client.blobs.Write(slowly(each))) for each in data]
        errors = await failures(calls, 28)
        assert {busy(error, "bytes of uploads") for error in errors} == {2.0}
        assert uploads.held == 2 * 8 * MIB, "half of the third, at 8 MiB each"
        going_on = [call for call in calls if not call.done()]
        go_on.set()
        assert all([(await call).committed_bytes > 10 for call in going_on])


async def test_a_request_that_does_not_arrive_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "_time_for", lambda _: 0.1)
    async with serving(tmp_path / "data") as (client, server):
        for method in ("OptimizerService/GetJob", "BlobService/Write"):
            call = client.channel.stream_stream(f"/fxlib.v1.{method}")()
            error = await failure(asyncio.wait_for(call.read(), 200))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert details(error, error_details_pb2.ErrorInfo).reason == "CALL_TIMEOUT"
            assert "did not arrive" in str(error.details())
        flight = core_of(server).in_flight
        await empty(flight.requests)
        assert (flight.uploads.held, flight.calls.held) == (0, 0)


async def test_a_call_without_a_message_is_not_valid(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as (client, _):
        call = client.channel.stream_stream("/fxlib.v1.OptimizerService/GetJob")(iter(()))
        error = await failure(call.read())
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")


async def test_an_answer_that_nobody_takes_fills_no_other_tenants_share(tmp_path: Path) -> None:
    data = bytes(64 * MIB)  # more than client and server hold on the way
    chunks = [blobs_pb2.WriteRequest(offset=at, data=data[at : at + MIB]) for at in range(0, len(data), MIB)]
    chunks[0].blob.CopyFrom(ref(data))
    async with guarded(tmp_path, limits=Limits(message_bytes=2 * MIB, in_flight_bytes=12 * MIB)) as service:
        await service.blobs.Write(iter(chunks), metadata=bearer("ads"))
        await service.submit("web")
        asked = blobs_pb2.ReadRequest(blob=ref(data))
        readers = [service.blobs.Read(asked, metadata=bearer("ads")) for _ in range(3)]
        for reader in readers[:2]:
            assert len((await reader.read()).data) == MIB
        await asyncio.sleep(1.0)
        await service.jobs.ListJobs(jobs_pb2.ListJobsRequest(), metadata=bearer("web"))
        waiting = asyncio.ensure_future(service.jobs.ListJobs(jobs_pb2.ListJobsRequest(), metadata=bearer("ads")))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        for reader in readers:
            reader.cancel()
        await waiting


async def test_a_connection_without_calls_is_closed_and_opened_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", limits=Limits(idle_s=0.2)) as (client, _):
        await client.jobs.GetCapabilities(jobs_pb2.GetCapabilitiesRequest())
        async with asyncio.timeout(60):
            while client.channel.get_state() is not grpc.ChannelConnectivity.IDLE:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await client.jobs.GetCapabilities(jobs_pb2.GetCapabilitiesRequest())


def test_a_budget_that_no_message_fits_into_is_refused() -> None:
    with pytest.raises(OptionError, match=r"max-in-flight-bytes.*six times the largest message"):
        Limits(in_flight_bytes=40 * MIB)
