"""The lease of a job, kept alive by heartbeats on a separate thread, which also notices when the lease has ended."""

from __future__ import annotations

import queue
import threading
import time
from types import TracebackType
from typing import Final, Self

import grpc

from fxlib.client.connection import understand
from fxlib.errors import CredentialError
from fxlib.v1 import workers_pb2
from fxlib_workers import logs
from fxlib_workers.service_client import ServiceClient

_LOG: Final = logs.Log(__name__)

_HEARTBEATS_PER_LEASE: Final = 3

_LEAST_INTERVAL_S: Final = 1.0
"""The shortest time in seconds between two reports of progress within one phase."""

_Progress = tuple[str, str, float | None]


class LeaseOverError(Exception):
    """This worker may no longer finish the job."""


class JobCancelledError(LeaseOverError):
    """The user cancelled the job."""


class LeaseLostError(LeaseOverError):
    """The service gave the job to another worker, or has forgotten it."""


class WorkerShutdownError(LeaseOverError):
    """The worker is about to end."""


class ActiveLease:
    """Keeps the lease of one job alive and sends its progress, while the context is open.

    Args:
        service: the client that sends heartbeats and progress.
        message: the lease as the service granted it.
        shutdown: an event that is set when the worker has to end.
    """

    def __init__(self, service: ServiceClient, message: workers_pb2.Lease, shutdown: threading.Event) -> None:
        self.message = message
        self._service = service
        self._shutdown = shutdown
        self._over: LeaseOverError | None = None
        self._queue: queue.SimpleQueue[_Progress | None] = queue.SimpleQueue()
        self._phase, self._reported_at = "", 0.0
        self._thread = threading.Thread(target=self._run, name=f"lease {message.job_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._queue.put(None)
        self._thread.join()

    @property
    def job_id(self) -> str:
        """The leased job's id."""
        return self.message.job_id

    def check(self) -> None:
        """Return if this worker should still finish the job.

        Raises:
            JobCancelledError, LeaseLostError, WorkerShutdownError: the worker should not.
        """
        if self._over is not None:
            raise self._over
        if self._shutdown.is_set():
            raise WorkerShutdownError

    def report_progress(self, phase: str, message: str, progress: float | None = None) -> None:
        """Schedule a line for the job's history. The call returns at once, and lines that come too fast are dropped."""
        now = time.monotonic()
        if phase == self._phase and progress is not None and now - self._reported_at < _LEAST_INTERVAL_S:
            return
        self._phase, self._reported_at = phase, now
        self._queue.put((phase, message, progress))

    def _run(self) -> None:
        period_s = self.message.duration_s / _HEARTBEATS_PER_LEASE
        due_at = time.monotonic()
        while self._over is None:
            try:
                progress = self._queue.get(timeout=max(0.0, due_at - time.monotonic()))
            except queue.Empty:
                self._heartbeat()
                due_at = time.monotonic() + period_s
                continue
            if progress is None:
                return
            self._send(progress)

    def _heartbeat(self) -> None:
        try:
            if not self._service.heartbeat(self.message):
                self._over = JobCancelledError()
        except grpc.RpcError as error:
            self._failed(error)
        except CredentialError as error:  # a service that restarts writes its token anew
            _LOG.warning("heartbeat failed", job=self.job_id, error=error)

    def _send(self, progress: _Progress) -> None:
        try:
            self._service.report(self.message, *progress)
        except grpc.RpcError as error:
            self._failed(error)
        except CredentialError as error:  # a service that restarts writes its token anew
            _LOG.warning("heartbeat failed", job=self.job_id, error=error)

    def _failed(self, error: grpc.RpcError) -> None:
        failure = understand(error)
        if failure.code in {"LEASE_LOST", "JOB_NOT_FOUND"}:
            self._over = LeaseLostError(failure.message)
        else:  # a service that restarts grants every running job a new lease
            _LOG.warning("heartbeat failed", job=self.job_id, error=failure.message)
