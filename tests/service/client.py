"""Blocking calls to a service that runs elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from fxlib.v1 import blobs_pb2, blobs_pb2_grpc, jobs_pb2, jobs_pb2_grpc, workers_pb2, workers_pb2_grpc
from tests.service.support import Process, answer, local, ref, request, worker


class Client:
    """Blocking stubs over one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.jobs: Any = jobs_pb2_grpc.OptimizerServiceStub(channel)
        self.blobs: Any = blobs_pb2_grpc.BlobServiceStub(channel)
        self.workers: Any = workers_pb2_grpc.WorkerServiceStub(channel)

    def put(self, data: bytes) -> None:
        self.blobs.Write(iter([blobs_pb2.WriteRequest(blob=ref(data), data=data)]))

    def submit(self, **options: Any) -> jobs_pb2.Job:
        job: jobs_pb2.Job = self.jobs.Optimize(request(**{"fresh": True, **options}), timeout=60).job
        return job

    def get(self, job_id: str) -> jobs_pb2.Job:
        job: jobs_pb2.Job = self.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job_id), timeout=60).job
        return job

    def claim(self, name: str = "w1", wait_s: float = 0.0) -> workers_pb2.Lease | None:
        response = self.workers.Claim(workers_pb2.ClaimRequest(worker=worker(name), wait_s=wait_s), timeout=60)
        return response.lease if response.HasField("lease") else None

    def complete(self, lease: workers_pb2.Lease, result: jobs_pb2.JobResult | None = None) -> None:
        result = result or answer()
        self.workers.Complete(workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token, result=result))

    def watch(self, job_id: str, after: int) -> list[int]:
        request = jobs_pb2.WatchJobRequest(job_id=job_id, after_sequence=after)
        return [response.event.sequence for response in self.jobs.WatchJob(request, timeout=60)]


@contextmanager
def running(data: Path, *options: str) -> Iterator[tuple[Process, Client]]:
    """A service in a process of its own, and a client of it."""
    process = Process(data, *options)
    try:
        with grpc.insecure_channel(local(process.listen)) as channel:
            yield process, Client(channel)
    finally:
        process.kill()
