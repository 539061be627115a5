"""A call outlasts what passes, and gives up on what does not."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from typing_extensions import override

from fxlib.client.connection import Connection, Deadline
from fxlib.client.watch_job import follow, get_job
from fxlib.errors import RejectedError, ServiceUnavailableError
from fxlib.spec.job import Event
from tests.client.scripted import RUNNING, SUCCEEDED, Scripted, event, serving
from tests.shared.real_service import free_port
from tests.shared.undisturbed import undisturbed

pytestmark = pytest.mark.slow

_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"


def _status(detail: any_pb2.Any, method: str = "GetJob") -> bytes:
    """A status as gRPC sends it, with one detail; its code and message are those that the scripted service gives."""
    status = status_pb2.Status(code=14, message=f"{method} fails as told", details=[detail])
    data: bytes = status.SerializeToString()
    return data


def test_what_may_pass_is_tried_again(service: Scripted, connection: Connection) -> None:
    service.fail("GetJob", grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
    assert get_job(connection, "job-1", Deadline(60)).id == "job-1"
    assert service.calls["GetJob"] == 3


def test_a_refusal_is_final_and_says_why(service: Scripted, connection: Connection) -> None:
    service.fail("GetJob", grpc.StatusCode.NOT_FOUND)
    with pytest.raises(RejectedError, match=r"asking for the job at 127.0.0.1:\d+: GetJob fails as told"):
        get_job(connection, "job-1", Deadline(60))
    assert service.calls["GetJob"] == 1


def test_trying_again_ends_with_the_deadline(service: Scripted, connection: Connection) -> None:
    service.fail("GetJob", *[grpc.StatusCode.UNAVAILABLE] * 1000)

    def tries() -> int:
        before = service.calls["GetJob"]
        with pytest.raises(ServiceUnavailableError):
            get_job(connection, "job-1", Deadline(0.5))
        return service.calls["GetJob"] - before

    assert 1 < undisturbed(tries, lambda made: made > 1) < 20


@pytest.mark.parametrize("details", [b"\xff garbage", _status(any_pb2.Any(type_url=_RETRY_INFO, value=b"\xff"))])
def test_details_that_cannot_be_read_leave_the_status(
    service: Scripted, connection: Connection, details: bytes
) -> None:
    service.details = details
    service.fail("GetJob", grpc.StatusCode.UNAVAILABLE)
    assert get_job(connection, "job-1", Deadline(60)).id == "job-1"
    service.fail("GetJob", grpc.StatusCode.NOT_FOUND)
    with pytest.raises(RejectedError, match="GetJob fails as told"):
        get_job(connection, "job-1", Deadline(60))


@pytest.mark.parametrize("seconds", [0, -5])
def test_a_service_that_says_at_once_is_not_asked_in_a_hurry(
    service: Scripted, connection: Connection, seconds: int
) -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds)))
    service.details = _status(detail)
    service.fail("GetJob", *[grpc.StatusCode.UNAVAILABLE] * 1000)
    with pytest.raises(ServiceUnavailableError):
        get_job(connection, "job-1", Deadline(0.5))
    assert 1 < service.calls["GetJob"] <= 11


def test_why_a_service_that_answers_takes_no_call_is_told(service: Scripted, connection: Connection) -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="QUOTA_EXCEEDED", domain="fxlib"))
    service.details = _status(detail, "GetCapabilities")
    service.fail("GetCapabilities", *[grpc.StatusCode.UNAVAILABLE] * 1000)
    with pytest.raises(ServiceUnavailableError, match="as it refuses: GetCapabilities fails as told"):
        connection.reach(Deadline(0.5))


def test_a_service_that_is_not_there_is_noticed_in_time() -> None:
    connection = Connection(f"127.0.0.1:{free_port()}")
    with pytest.raises(ServiceUnavailableError, match=r"not reached within 0.3 s"):
        connection.reach(Deadline(0.3))
    connection.close()


def test_a_service_that_accepts_and_says_nothing_is_noticed_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = Connection(f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ServiceUnavailableError):
            connection.reach(Deadline(0.3))
        connection.close()


def test_events_come_once_and_in_order_over_many_streams(service: Scripted, connection: Connection) -> None:
    service.events = [event(number, RUNNING, "qps") for number in range(1, 8)] + [event(8, SUCCEEDED, "done")]
    service.events_per_stream = 2
    service.fail("WatchJob", grpc.StatusCode.UNAVAILABLE)
    seen: list[Event] = []
    assert follow(connection, "job-1", Deadline(60), seen.append).state == "succeeded"
    assert [each.sequence for each in seen] == list(range(1, 9))
    assert service.asked_after == [0, 2, 4, 6]


class _CutAtTheEnd(Scripted):
    """Breaks the first stream of events after the last one, before the stream's end."""

    @override
    def WatchJob(self, request: Any, context: Any) -> Iterator[Any]:
        yield from super().WatchJob(request, context)
        if self.calls["WatchJob"] == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the line went dead")


def test_a_stream_that_breaks_after_the_last_event_has_told_that_the_job_is_done() -> None:
    service, seen = _CutAtTheEnd(), list[Event]()
    with serving(service) as address, closing(Connection(address)) as connection:
        assert follow(connection, "job-1", Deadline(60), seen.append).done
    assert [each.sequence for each in seen] == [1, 2]


def test_a_job_whose_events_were_all_heard_before_is_done(service: Scripted, connection: Connection) -> None:
    seen = list[Event]()
    assert follow(connection, "job-1", Deadline(60), seen.append, after=2).done
    assert not seen
    assert service.asked_after == [2]


def test_following_outlasts_a_restart_of_the_service(service: Scripted) -> None:
    address, seen = f"127.0.0.1:{free_port()}", list[Event]()
    service.events_per_stream = 1
    with ExitStack() as before, ExitStack() as after:
        before.enter_context(serving(service, address))
        connection = Connection(address)
        after.callback(connection.close)

        def restart(heard: Event) -> None:
            seen.append(heard)
            if heard.sequence == 1:
                before.close()
                after.enter_context(serving(service, address))

        assert follow(connection, "job-1", Deadline(60), restart).done
    assert [each.sequence for each in seen] == [1, 2]


def test_a_stream_that_ends_early_is_not_opened_in_a_hurry(service: Scripted, connection: Connection) -> None:
    service.events, service.job.state = [], RUNNING

    def streams() -> int:
        before = service.calls["WatchJob"]
        with pytest.raises(ServiceUnavailableError, match="job job-1 is not done within 1 s"):
            follow(connection, "job-1", Deadline(1), lambda _: None)
        return service.calls["WatchJob"] - before

    assert 2 <= undisturbed(streams, lambda opened: opened >= 2) <= 6  # 0.2 s apart
