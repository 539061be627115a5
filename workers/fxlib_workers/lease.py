"""A worker's hold on a job: heartbeats on a thread of their own, and word of when the hold is over."""

from __future__ import annotations

import queue
import threading
import time
from types import TracebackType
from typing import Final, Self

import grpc

from fxlib.client.failures import understand
from fxlib.v1 import workers_pb2
from fxlib_workers import logs
from fxlib_workers.service_client import ServiceClient

_BEATS_PER_LEASE: Final = 3
_LINES_APART_S: Final = 1.0

Line = tuple[str, str, float | None]


class HoldOverError(Exception):
    """The job is not this worker's to finish any more."""


class CancelledError(HoldOverError):
    """The user cancelled the job."""


class LeaseLostError(HoldOverError):
    """The service gave the job to another worker, or forgot it."""


class ShutdownError(HoldOverError):
    """The worker is to end."""


class Hold:
    """Keeps the lease of one job alive and sends progress, while the context is open.

    Args:
        link: to the service.
        lease: of the job.
        shutdown: set when the worker is to end.
    """

    def __init__(self, link: ServiceClient, lease: workers_pb2.Lease, shutdown: threading.Event) -> None:
        self.lease = lease
        self._link = link
        self._shutdown = shutdown
        self._over: HoldOverError | None = None
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._phase, self._told_at = "", 0.0
        self._thread = threading.Thread(target=self._keep, name=f"hold {lease.job_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lines.put(None)
        self._thread.join()

    def check(self) -> None:
        """Return if the job is still wanted of this worker.

        Raises:
            CancelledError, LeaseLostError, ShutdownError: it is not.
        """
        if self._over is not None:
            raise self._over
        if self._shutdown.is_set():
            raise ShutdownError

    def tell(self, phase: str, message: str, progress: float | None = None) -> None:
        """Have a line added to the job's history; returns at once, and drops lines that come too thickly."""
        now = time.monotonic()
        if phase == self._phase and progress is not None and now - self._told_at < _LINES_APART_S:
            return
        self._phase, self._told_at = phase, now
        self._lines.put((phase, message, progress))

    def _keep(self) -> None:
        period_s = self.lease.duration_s / _BEATS_PER_LEASE
        beat_at = time.monotonic()
        while self._over is None:
            try:
                line = self._lines.get(timeout=max(0.0, beat_at - time.monotonic()))
            except queue.Empty:
                self._beat()
                beat_at = time.monotonic() + period_s
                continue
            if line is None:
                return
            self._send(line)

    def _beat(self) -> None:
        try:
            if not self._link.heartbeat(self.lease):
                self._over = CancelledError()
        except grpc.RpcError as error:
            self._missed(error)

    def _send(self, line: Line) -> None:
        try:
            self._link.report(self.lease, *line)
        except grpc.RpcError as error:
            self._missed(error)

    def _missed(self, error: grpc.RpcError) -> None:
        failure = understand(error)
        if failure.code in {"LEASE_LOST", "JOB_NOT_FOUND"}:
            self._over = LeaseLostError(failure.message)
        else:  # a service that restarts grants every running job a new lease
            logs.warning("heartbeat failed", job=self.lease.job_id, error=failure.message)
