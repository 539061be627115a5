"""A thousand calls at once."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from fxlib.v1 import jobs_pb2, jobs_pb2_grpc, workers_pb2, workers_pb2_grpc
from tests.service.client import Client
from tests.service.support import Process, answer, graph_bytes, local, request, worker

JOBS, WORKERS, REPORTS, WATCHERS = 100, 8, 3, 3
CALLS = JOBS * (1 + WATCHERS + 1 + 1 + REPORTS + 1 + 1)


async def launch(jobs: Any, number: int) -> None:
    """A launcher: submit, follow with some friends, fetch the answer."""
    asked = request(name=f"model-{number % 20}", namespace=f"team-{number % 5}", fresh=True)
    job_id = (await jobs.Optimize(asked)).job.id
    await asyncio.gather(*(follow(jobs, job_id) for _ in range(WATCHERS)))
    ended = (await jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job_id))).job
    assert ended.result == answer()


async def follow(jobs: Any, job_id: str) -> None:
    events = [each.event async for each in jobs.WatchJob(jobs_pb2.WatchJobRequest(job_id=job_id))]
    assert [event.sequence for event in events] == list(range(1, 4 + REPORTS))


async def toil(workers: Any, name: str, over: asyncio.Event) -> int:
    """A worker: jobs until all is over; returns how many."""
    done = 0
    while not over.is_set():
        claimed = await workers.Claim(workers_pb2.ClaimRequest(worker=worker(name), wait_s=1))
        if not claimed.HasField("lease"):
            continue
        job_id, token = claimed.lease.job_id, claimed.lease.token
        for turn in range(REPORTS):
            said = workers_pb2.ReportRequest(job_id=job_id, token=token, phase="qps", progress=turn / REPORTS)
            await workers.Report(said)
        await workers.Heartbeat(workers_pb2.HeartbeatRequest(job_id=job_id, token=token))
        await workers.Complete(workers_pb2.CompleteRequest(job_id=job_id, token=token, result=answer()))
        done += 1
    return done


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


@pytest.mark.slow
async def test_a_thousand_calls_at_once_are_served_in_bounded_memory(tmp_path: Path) -> None:
    process = Process(tmp_path / "data")
    try:
        with grpc.insecure_channel(local(process.listen)) as blocking:
            Client(blocking).put(graph_bytes())
        before, began = resident_bytes(process.pid), time.monotonic()
        async with grpc.aio.insecure_channel(local(process.listen)) as channel:
            jobs: Any = jobs_pb2_grpc.OptimizerServiceStub(channel)
            workers: Any = workers_pb2_grpc.WorkerServiceStub(channel)
            launchers = asyncio.gather(*(launch(jobs, number) for number in range(JOBS)))
            over = asyncio.Event()
            toilers = asyncio.gather(*(toil(workers, f"w{number}", over) for number in range(WORKERS)))
            await launchers
            over.set()
            seconds = time.monotonic() - began
            assert sum(await toilers) == JOBS
        grown = resident_bytes(process.pid) - before
        print(f"{CALLS} calls in {seconds:.1f} s ({CALLS / seconds:.0f} a second), {grown >> 20} MiB more memory")
        assert grown < 200 << 20
    finally:
        process.kill()
