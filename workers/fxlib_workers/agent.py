"""A worker: it claims one job after another, until it is told to end."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import grpc

from fxlib.client.failures import understand
from fxlib.errors import FxlibError, RemoteError
from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_workers import logs
from fxlib_workers.config import Config
from fxlib_workers.lease import CancelledError, Hold, HoldOverError, ShutdownError
from fxlib_workers.process.host_lock import HostLock
from fxlib_workers.process.reaper import delete
from fxlib_workers.run_job import JobRunner
from fxlib_workers.service_client import ServiceClient
from fxlib_workers.trial.driver import Trials

_PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)


class Agent:
    """One worker process. `run` returns when it was told to end, or after one job if the configuration says so."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._shutdown = threading.Event()
        self._told = False
        self._link = ServiceClient(config)

    def run(self) -> None:
        """Work until SIGTERM or SIGINT; jobs in hand are given back."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        root = Path(tempfile.mkdtemp(prefix="fxlib-worker-"))
        trials = Trials(self._config.trial, root)
        runner = JobRunner(
            config=self._config, link=self._link, lock=HostLock(self._config.host_lock), trials=trials, root=root
        )
        info = self._link.info
        logs.info("worker", name=info.worker_id, service=self._config.service, torch=info.torch_version)
        slots = [threading.Thread(target=self._serve, args=[runner], daemon=True) for _ in range(self._config.slots)]
        try:
            trials.start()
            for slot in slots:
                slot.start()
            while any(slot.is_alive() for slot in slots):
                if self._told:
                    self._shutdown.set()
                time.sleep(0.1)
        finally:
            self._shutdown.set()
            for slot in slots:
                slot.join()
            trials.end()
            self._link.close()
            delete(root)
            logs.info("worker ended", name=info.worker_id)

    def _note(self, *_: object) -> None:
        """Note a signal. An event set here would wait for a lock that the code it interrupts may hold."""
        self._told = True

    def _serve(self, runner: JobRunner) -> None:
        while not self._shutdown.is_set():
            lease = self._claim()
            if lease is None:
                continue
            self._work(runner, lease)
            if self._config.once:
                self._shutdown.set()

    def _claim(self) -> workers_pb2.Lease | None:
        for pause_s in (*_PAUSES_S, *[_PAUSES_S[-1]] * 1_000_000):
            if self._shutdown.is_set():
                return None
            try:
                return self._link.claim(self._shutdown)
            except grpc.RpcError as error:
                logs.warning("cannot claim", error=understand(error).message, retry_s=pause_s)
                self._shutdown.wait(pause_s)
        return None

    def _work(self, runner: JobRunner, lease: workers_pb2.Lease) -> None:
        logs.info("claimed", job=lease.job_id, attempt=lease.attempt, model=lease.request.name)
        with Hold(self._link, lease, self._shutdown) as hold:
            try:
                runner.work(hold)
            except ShutdownError:
                self._link.release(lease)
                logs.info("given back", job=lease.job_id)
            except HoldOverError as over:
                what = "cancelled" if isinstance(over, CancelledError) else "lease lost"
                logs.info(what, job=lease.job_id, why=over)
            except RemoteError as error:
                logs.warning("answer not delivered", job=lease.job_id, error=error)
            except (FxlibError, OSError, ValueError) as error:
                logs.warning("worker failed", job=lease.job_id, error=error)
                failure = jobs_pb2.JobFailure(code="WORKER_FAILED", message=f"{type(error).__name__}: {error}")
                self._link.complete(lease, failure)
