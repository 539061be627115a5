"""The worker's calls to the service: claim, heartbeat, report, complete, release; blobs down and up."""

from __future__ import annotations

import platform
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import grpc
import torch

import fxlib
from fxlib.client.blobs import download, upload
from fxlib.client.connection import Connection, Deadline, understand
from fxlib.client.credentials import Tls
from fxlib.errors import CredentialError, RejectedError, ServiceUnavailableError, WireError
from fxlib.protocol import blob_from_proto, blob_ref
from fxlib.spec.job import Blob
from fxlib.utils.hardware import cores, processor
from fxlib.v1 import graph_pb2, jobs_pb2, workers_pb2, workers_pb2_grpc
from fxlib_workers import logs
from fxlib_workers.config import Config
from fxlib_workers.process.limits import host_memory_bytes
from fxlib_workers.process.probe import Level

_LOG: Final = logs.Log(__name__)

Check = Callable[[], None]
"""A function that raises `LeaseOverError` when this worker may no longer finish the job."""

_CALL_S: Final = 10.0
"""The deadline of a small call, in seconds."""

_POLL_S: Final = 0.1
_TRANSFER_S: Final = 600.0
"""The deadline of an upload or a download, in seconds."""

_AWAY_S: Final = 1.0
"""The pause in seconds before a service that was unreachable or full is asked again."""

_STORAGE_FULL: Final = "STORAGE_FULL"
"""The service's error code for a full disk."""

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class ServiceClient:
    """One worker's connection to the service.

    Args:
        config: the worker's options.
        containment: the level at which the worker contains a job's graph.

    Raises:
        CredentialError: a token was named but is missing, or may not be sent.
    """

    def __init__(self, config: Config, containment: Level = Level.NONE) -> None:
        tls = Tls(ca=config.tls_ca, certificate=config.tls_certificate, key=config.tls_key)
        self._connection = Connection(
            config.service,
            tls=tls if tls != Tls() else None,
            token_file=config.token_file,
            insecure=config.insecure,
        )
        self._connection.check_credentials()
        self._stub = self._connection.stub(workers_pb2_grpc.WorkerServiceStub)
        self._claim_wait_s = config.claim_wait_s
        self._outage_s = config.outage_s
        self.info = jobs_pb2.WorkerInfo(
            worker_id=config.name,
            torch_version=str(torch.__version__),
            hardware=fingerprint(config.trial.ray_address),
            allowed_modules=config.trial.allowed_modules,
            fxlib_version=fxlib.__version__,
            containment=containment,
            labels=dict(config.labels),
        )

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        self._connection.close()

    def claim(self, shutdown: threading.Event) -> workers_pb2.Lease | None:
        """Wait for a job; return None if none came for a while, or if `shutdown` was set.

        Raises:
            grpc.RpcError: the service is away, or refuses.
        """
        request = workers_pb2.ClaimRequest(worker=self.info, wait_s=self._claim_wait_s)
        call = self._stub.Claim.future(request, timeout=self._claim_wait_s + _CALL_S)
        answered = threading.Event()
        call.add_done_callback(lambda _: answered.set())
        while not answered.wait(_POLL_S):
            if shutdown.is_set() and call.cancel():
                return None
        response = call.result()
        return response.lease if response.HasField("lease") else None

    def heartbeat(self, lease: workers_pb2.Lease) -> bool:
        """Keep a lease alive; return False if the job was cancelled.

        Raises:
            grpc.RpcError: the service is unreachable, or the lease is lost.
        """
        request = workers_pb2.HeartbeatRequest(job_id=lease.job_id, token=lease.token)
        return not self._stub.Heartbeat(request, timeout=_CALL_S).cancelled

    def report(self, lease: workers_pb2.Lease, phase: str, message: str, progress: float | None) -> None:
        """Add a line to the job's history.

        Raises:
            grpc.RpcError: the service is away, or refuses.
        """
        request = workers_pb2.ReportRequest(
            job_id=lease.job_id,
            token=lease.token,
            phase=phase,
            message=message,
            progress=-1.0 if progress is None else progress,
        )
        self._stub.Report(request, timeout=_CALL_S)

    def complete(
        self, lease: workers_pb2.Lease, outcome: jobs_pb2.JobResult | jobs_pb2.JobFailure, check: Check
    ) -> None:
        """Submit the answer, waiting for a service that restarts or whose disk is full.

        Raises:
            RemoteError: the lease is lost, or the service stayed away.
            LeaseOverError: by `check`, the job is no longer this worker's to finish.
        """
        request = workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token)
        if isinstance(outcome, jobs_pb2.JobResult):
            request.result.CopyFrom(outcome)
        else:
            request.failure.CopyFrom(outcome)
        self._retry_while_away("completing a job", lambda left_s: self._stub.Complete(request, timeout=left_s), check)

    def release(self, lease: workers_pb2.Lease) -> None:
        """Return the job unfinished if the service is reachable; if not, the lease simply runs out."""
        request = workers_pb2.ReleaseRequest(job_id=lease.job_id, token=lease.token)
        try:
            self._stub.Release(request, timeout=_CALL_S / 2)
        except (grpc.RpcError, CredentialError) as error:
            problem = understand(error).message if isinstance(error, grpc.RpcError) else error
            _LOG.warning("job not given back", job=lease.job_id, error=problem)

    def fetch(self, ref: graph_pb2.BlobRef) -> bytes:
        """Download a blob.

        Raises:
            RemoteError: the service stayed unreachable, or has no such blob.
            WireError: the address is not a SHA-256, or does not match the bytes.
        """
        if not _SHA256.fullmatch(ref.sha256):
            raise WireError("not a SHA-256 in lower-case hex", where="BlobRef.sha256")
        return download(self._connection, blob_from_proto(ref), Deadline(_TRANSFER_S))

    def store(self, lease: workers_pb2.Lease, data: bytes, check: Check) -> Blob:
        """Upload a blob of a job's answer, and return its address.

        Raises:
            RemoteError, LeaseOverError: as for `store_all`.
        """
        blob = blob_from_proto(blob_ref(data))
        self.store_all(lease, {blob.sha256: data}, check)
        return blob

    def store_all(self, lease: workers_pb2.Lease, blobs: Mapping[str, bytes], check: Check) -> None:
        """Upload blobs of a job's answer, by SHA-256.

        Raises:
            RemoteError: the service stayed away, or refuses.
            LeaseOverError: by `check`, the job is no longer this worker's to finish.
        """

        def attempt(_: float) -> None:
            upload(self._connection, blobs, Deadline(_TRANSFER_S), lease=lease.token)

        self._retry_while_away("uploading the answer", attempt, check)

    def _retry_while_away(self, what: str, attempt: Callable[[float], object], check: Check) -> None:
        """Repeat a call while the service is unreachable, for a limited time, or full, for as long as the lease lasts.

        A finished measurement is worth the wait, and heartbeats keep the lease alive whatever the state of the disk.
        """

        def checked(left_s: float) -> object:
            check()  # each time, so that a worker that has to end does not wait until the service is back
            return attempt(left_s)

        deadline = Deadline(self._outage_s)
        while True:
            try:
                self._connection.call(what, checked, deadline)
            except (ServiceUnavailableError, CredentialError) as error:  # a service that restarts writes its token anew
                if deadline.passed:
                    raise
                _LOG.warning("service away", doing=what, error=error)
            except RejectedError as error:
                if error.code != _STORAGE_FULL:
                    raise
                deadline = Deadline(self._outage_s)
                _LOG.warning("service full", doing=what, error=error)
            else:
                return
            check()
            time.sleep(_AWAY_S)


def fingerprint(ray_address: str = "") -> str:
    """Return architecture, processor, usable cores, memory in GiB, accelerators, and the cluster if there is one.

    >>> fingerprint()
    'x86_64, AMD EPYC 7763 64-Core Processor, 2 cores, 24 GiB'
    """
    parts = [platform.machine(), processor(), f"{cores()} cores", f"{round(host_memory_bytes() / (1 << 30))} GiB"]
    parts += _accelerators()
    if ray_address:
        parts.append(f"Ray at {ray_address}")
    return ", ".join(filter(None, parts))


def _accelerators() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
