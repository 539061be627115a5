"""The main loop of a worker process: it claims one job after another, until it is told to end."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import grpc

from fxlib.client.failures import understand
from fxlib.errors import CredentialError, FxlibError, RemoteError
from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_workers import logs
from fxlib_workers.config import Config
from fxlib_workers.lease import ActiveLease, JobCancelledError, LeaseOverError, WorkerShutdownError
from fxlib_workers.process.host_lock import HostLock
from fxlib_workers.process.reaper import delete
from fxlib_workers.run_job import JobRunner
from fxlib_workers.service_client import ServiceClient
from fxlib_workers.trial.driver import TrialDriver

_LOG: Final = logs.Log(__name__)

_BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
"""The pauses between failed claims; the last one is repeated."""


class Agent:
    """One worker process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._shutdown = threading.Event()
        self._signalled = False
        self._service = ServiceClient(config)

    def run(self) -> None:
        """Work until SIGTERM or SIGINT, or until one job is done if `once` is set; unfinished jobs are given back."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        root = Path(tempfile.mkdtemp(prefix="fxlib-worker-"))
        driver = TrialDriver(self._config.trial, root)
        runner = JobRunner(
            config=self._config,
            service=self._service,
            lock=HostLock(self._config.host_lock),
            driver=driver,
            root=root,
        )
        info = self._service.info
        _LOG.info("worker", name=info.worker_id, service=self._config.service, torch=info.torch_version)
        slots = [threading.Thread(target=self._run_slot, args=[runner], daemon=True) for _ in range(self._config.slots)]
        try:
            driver.start()
            for slot in slots:
                slot.start()
            while any(slot.is_alive() for slot in slots):
                if self._signalled:
                    self._shutdown.set()
                time.sleep(0.1)
        finally:
            self._shutdown.set()
            for slot in slots:
                slot.join()
            driver.end()
            self._service.close()
            delete(root)
            _LOG.info("worker ended", name=info.worker_id)

    def _note_signal(self, *_: object) -> None:
        """Note a signal. An event set here would wait for a lock that the interrupted code may hold."""
        self._signalled = True

    def _run_slot(self, runner: JobRunner) -> None:
        while not self._shutdown.is_set():
            message = self._claim()
            if message is None:
                continue
            self._run_job(runner, message)
            if self._config.once:
                self._shutdown.set()

    def _claim(self) -> workers_pb2.Lease | None:
        failures = 0
        while not self._shutdown.is_set():
            try:
                return self._service.claim(self._shutdown)
            except (grpc.RpcError, CredentialError) as error:
                pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                told = understand(error).message if isinstance(error, grpc.RpcError) else error
                _LOG.warning("cannot claim", error=told, retry_s=pause_s)
                self._shutdown.wait(pause_s)
                failures += 1
        return None

    def _run_job(self, runner: JobRunner, message: workers_pb2.Lease) -> None:
        _LOG.info("claimed", job=message.job_id, attempt=message.attempt, model=message.request.name)
        with ActiveLease(self._service, message, self._shutdown) as lease:
            try:
                runner.run(lease)
            except WorkerShutdownError:
                self._service.release(message)
                _LOG.info("given back", job=message.job_id)
            except LeaseOverError as over:
                event = "cancelled" if isinstance(over, JobCancelledError) else "lease lost"
                _LOG.info(event, job=message.job_id, why=over)
            except RemoteError as error:
                _LOG.warning("answer not delivered", job=message.job_id, error=error)
            except (FxlibError, OSError, ValueError) as error:
                _LOG.warning("worker failed", job=message.job_id, error=error)
                failure = jobs_pb2.JobFailure(code="WORKER_FAILED", message=f"{type(error).__name__}: {error}")
                self._service.complete(message, failure)
