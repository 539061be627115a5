"""The lease of a worker's job, kept alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from fxlib.v1 import workers_pb2
from fxlib_workers.lease import ActiveLease, JobCancelledError, LeaseLostError, WorkerShutdownError
from tests.workers.clock import Clock, shown_to

MESSAGE = workers_pb2.Lease(job_id="job", token="token", duration_s=0.15)


class Refusal(grpc.RpcError):
    """A failed call, with the service's own code."""

    def __init__(self, status: grpc.StatusCode, code: str) -> None:
        self._status, self._code = status, code

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return "refused"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:  # type: ignore[override]
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason=self._code))
        status = status_pb2.Status(code=self._status.value[0], message="refused", details=[detail])
        return (("grpc-status-details-bin", status.SerializeToString()),)


class Service:
    """Answers heartbeats by a function, and records progress."""

    def __init__(self, beat: Callable[[], bool] = lambda: True) -> None:
        self.beat = beat
        self.beats = 0
        self.lines: list[tuple[str, str, float | None]] = []

    def heartbeat(self, lease: workers_pb2.Lease) -> bool:
        self.beats += 1
        return self.beat()

    def report(self, lease: workers_pb2.Lease, phase: str, message: str, progress: float | None) -> None:
        self.lines.append((phase, message, progress))


def raising(error: Exception) -> Callable[[], bool]:
    def beat() -> bool:
        raise error

    return beat


def active(service: Service, shutdown: threading.Event | None = None) -> ActiveLease:
    return ActiveLease(service, MESSAGE, shutdown or threading.Event())  # type: ignore[arg-type]


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 200
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def check_for_long(lease: ActiveLease) -> None:
    for _ in range(6000):
        lease.check()
        time.sleep(0.01)


def test_heartbeats_come_several_times_a_lease() -> None:
    service = Service()
    with active(service) as lease:
        assert wait_for(lambda: service.beats >= 4)
        lease.check()


def test_a_cancelled_job_is_over() -> None:
    with active(Service(lambda: False)) as lease, pytest.raises(JobCancelledError):
        check_for_long(lease)


def test_a_lost_lease_is_over() -> None:
    lost = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST")
    with active(Service(raising(lost))) as lease, pytest.raises(LeaseLostError):
        check_for_long(lease)


def test_a_service_that_is_away_for_a_while_does_no_harm() -> None:
    service = Service(raising(Refusal(grpc.StatusCode.UNAVAILABLE, "")))
    with active(service) as lease:
        assert wait_for(lambda: service.beats >= 3)
        lease.check()


def test_shutdown_is_over() -> None:
    shutdown = threading.Event()
    with active(Service(), shutdown) as lease:
        lease.check()
        shutdown.set()
        with pytest.raises(WorkerShutdownError):
            lease.check()


def test_progress_is_sent_in_order_and_not_too_fast() -> None:
    service = Service()
    with shown_to(Clock(), "fxlib_workers.lease"), active(service) as lease:
        lease.report_progress("rewrite", "begun")
        for pair in range(100):
            lease.report_progress("qps", f"pair {pair}", pair / 100)
    assert service.lines == [("rewrite", "begun", None), ("qps", "pair 0", 0.0)]
