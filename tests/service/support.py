"""What the tests of the service share: requests, answers, a service without sockets, and one in its own process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import ssl
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

from torch import nn
from torch.fx import symbolic_trace

from fxlib import wire
from fxlib.utils.local_service import find
from fxlib.v1 import blobs_pb2, graph_pb2, jobs_pb2, workers_pb2, workload_pb2
from fxlib_service.blobs.base import BlobStore
from fxlib_service.clock import Clock
from fxlib_service.config import Config, Limits
from fxlib_service.core import Core, make_core
from fxlib_service.errors import ServiceError
from fxlib_service.reserve import Reserve
from fxlib_service.stores.base import JobStore
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.memory_job_store import MemoryJobStore
from tests.shared.forked import Module

TORCH = "2.13.0"


@cache
def graph_bytes(width: int = 2) -> bytes:
    return wire.encode(symbolic_trace(nn.Linear(width, width))).graph.SerializeToString(deterministic=True)


def ref(data: bytes) -> graph_pb2.BlobRef:
    return graph_pb2.BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def workload() -> workload_pb2.Workload:
    return workload_pb2.Workload(
        description=workload_pb2.BatchSpec(inputs=[workload_pb2.TensorSpec(shape=[4, 2], dtype="float32")], count=2),
        loss=workload_pb2.Loss(name="mean"),
        optimizer=workload_pb2.OptimizerSpec(name="sgd", lr=0.1),
        mode=workload_pb2.STEP_MODE_LOCAL,
        threads=1,
        trainers=1,
    )


def request(
    *,
    graph: bytes | None = None,
    name: str = "dlrm",
    namespace: str = "",
    request_id: str | None = None,
    fresh: bool = False,
    torch_version: str = TORCH,
    labels: dict[str, str] | None = None,
    where: dict[str, str] | None = None,
    traceparent: str = "",
) -> jobs_pb2.OptimizeRequest:
    return jobs_pb2.OptimizeRequest(
        request_id=uuid.uuid4().hex if request_id is None else request_id,
        name=name,
        namespace=namespace,
        labels=labels,
        where=where,
        graph=ref(graph_bytes() if graph is None else graph),
        workload=workload(),
        recipe=jobs_pb2.Recipe(name="schedule"),
        torch_version=torch_version,
        fresh=fresh,
        traceparent=traceparent,
    )


def worker(
    name: str = "w1",
    *,
    torch_version: str = TORCH,
    hardware: str = "cpu-a",
    containment: str = "",
    labels: dict[str, str] | None = None,
) -> jobs_pb2.WorkerInfo:
    return jobs_pb2.WorkerInfo(
        worker_id=name,
        torch_version=torch_version,
        hardware=hardware,
        fxlib_version="0.1.0",
        containment=containment,
        labels=labels,
    )


def answer(*, gain: float = 0.5, reason: str = "FASTER", calls: int = 3) -> jobs_pb2.JobResult:
    adopt = reason == "FASTER"
    return jobs_pb2.JobResult(
        decision=jobs_pb2.DECISION_ADOPT if adopt else jobs_pb2.DECISION_KEEP_ORIGINAL,
        reason_code=reason,
        reason="a reason",
        graph=ref(graph_bytes()) if adopt else None,
        qps_original=jobs_pb2.Estimate(value=100, low=99, high=101),
        qps_optimized=jobs_pb2.Estimate(value=100 * (1 + gain), low=100, high=200),
        gain=jobs_pb2.Estimate(value=gain, low=gain - 0.1, high=gain + 0.1),
        calls=[
            jobs_pb2.CallReport(node=f"call_{i}", action="moved", reason_code="MOVED", reason="moved")
            for i in range(calls)
        ],
        passes=[jobs_pb2.PassReport(name="hoist", changes=calls, seconds=0.01)],
        preserves="bitwise",
        phase_seconds={"rewrite": 0.5, "sameness": 1.0, "qps": 4.0},
    )


@asynccontextmanager
async def make_service(
    store: JobStore | None = None,
    blobs: BlobStore | None = None,
    *,
    lease_s: float = 30.0,
    limits: Limits | None = None,
    graphs: Iterable[bytes] = (),
    clock: Clock | None = None,
    reserve: Reserve | None = None,
) -> AsyncIterator[Core]:
    """A service without sockets, that has the usual graph (and more)."""
    config = Config(data=Path("unused"), lease_s=lease_s, limits=limits or Limits())
    core = await make_core(config, store or MemoryJobStore(), blobs or MemoryBlobStore(), clock=clock, reserve=reserve)
    for data in (graph_bytes(), *graphs):
        await put(core, data)
    try:
        yield core
    finally:
        await core.close()


async def put(core: Core, data: bytes) -> None:
    await core.blobs.Write(stream([blobs_pb2.WriteRequest(blob=ref(data), data=data)]), None)


async def stream(messages: Iterable[blobs_pb2.WriteRequest]) -> AsyncIterator[blobs_pb2.WriteRequest]:
    for message in messages:
        await asyncio.sleep(0)
        yield message


async def submit(core: Core, asked: jobs_pb2.OptimizeRequest | None = None) -> jobs_pb2.Job:
    return (await core.optimizer.Optimize(asked or request(), None)).job


async def get(core: Core, job_id: str) -> jobs_pb2.Job:
    return (await core.optimizer.GetJob(jobs_pb2.GetJobRequest(job_id=job_id), None)).job


async def claim(core: Core, who: jobs_pb2.WorkerInfo | None = None, *, wait_s: float = 0.0) -> workers_pb2.Lease | None:
    response = await core.workers.Claim(workers_pb2.ClaimRequest(worker=who or worker(), wait_s=wait_s), None)
    return response.lease if response.HasField("lease") else None


async def complete(core: Core, lease: workers_pb2.Lease, result: jobs_pb2.JobResult | None = None) -> None:
    await core.workers.Complete(
        workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token, result=result or answer()), None
    )


async def work(core: Core, result: jobs_pb2.JobResult | None = None, who: jobs_pb2.WorkerInfo | None = None) -> str:
    """Claim the next job and answer it."""
    lease = await claim(core, who)
    assert lease is not None
    await complete(core, lease, result)
    return lease.job_id


def fields(error: ServiceError) -> list[str]:
    return [violation.field for violation in error.violations]


class Process:
    """A service in its own process."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data = data
        log, out = (data.parent / f"{data.name}.{kind}" for kind in ("log", "out"))
        out.unlink(missing_ok=True)
        arguments = ["--data", str(data), "--shutdown-grace-seconds", "1", "--metrics", "127.0.0.1:0"]
        if "--listen" not in options:
            arguments += ["--listen", "127.0.0.1:0"]
        self._process = Module("fxlib_service", *arguments, *options, log=log, out=out)
        try:
            self.ready = json.loads(self._process.until_written(out))
        except AssertionError as error:
            self.kill()
            raise AssertionError(log.read_text()) from error
        self.listen: str = self.ready["listen"]
        self.metrics: str = self.ready["metrics"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)

    def stop(self) -> int:
        """Ask it to end, and return its exit status."""
        return self._process.end()


def local(listen: object) -> str:
    """The socket of this user's service on a port, as gRPC names it: whoever comes there is the owner."""
    found = find(int(str(listen).rpartition(":")[2]))
    assert found is not None
    return found.target


def refused(*options: str) -> str:
    """Start a service that will not start, and return what it says."""
    with NamedTemporaryFile() as log:
        assert Module("fxlib_service", *options, log=Path(log.name)).wait(120) == 2
        return Path(log.name).read_text()


def fetch(url: str, context: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, timeout=60, context=context) as response:  # noqa: S310  # our own address
        text: str = response.read().decode()
        return text


def eventually(seconds: float = 200.0) -> Iterable[float]:
    """Yield until the time is over: for conditions that come true soon."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        yield left
        time.sleep(0.05)


def states(jobs: Sequence[jobs_pb2.Job]) -> list[str]:
    return [jobs_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower() for job in jobs]
