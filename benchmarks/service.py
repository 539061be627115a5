"""How the service bears load: calls at a fixed rate, launchers that start together, watchers, and floods.

The service, with the processes that check, has one core, and everything that calls it has another one. Arms: `service`,
and `floor`, an empty gRPC handler of the same library in a process beside the service, called by the same client in the
same moments; what the floor takes is the generator's, gRPC's and the machine's, and not the service's. Latencies count
from the moment at which a call was due. Floods come from a tenant of their own, while an honest one goes on with 20
calls a second: big messages (120 clients, each with Optimize requests of 5 MiB), open uploads (400 that stop midway),
repeated requests (6 clients with one graph of 20,000 nodes that is refused), a storm of GetCapabilities, results of
6 MiB, cached graphs (20 clients with a request that the cache answers, for a graph of 1 MiB) and live reports (20
clients with figures of one job). Each load has a service of its own, and may be run alone, as a part. Memory is the
peak of the service's process, and of it with its checking processes, shared pages counting once.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, Self

import grpc
import numpy as np
import psutil
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from benchmarks.report import Row, main, row
from fxlib import wire
from fxlib.v1 import (
    blobs_pb2,
    blobs_pb2_grpc,
    graph_pb2,
    jobs_pb2,
    jobs_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
    workload_pb2,
)

TORCH: Final = "2.13.0"
MIB: Final = 1 << 20
CORES: Final = sorted(os.sched_getaffinity(0))
SERVICE_CORE, CLIENT_CORE = CORES[0], CORES[-1]
RATE: Final = 200
HONEST_RATE: Final = 20
LAUNCHERS: Final = 600
WATCHERS: Final = 1_000
_MOST_NODES: Final = 39_000
FLOOR: Final = "/floor/Empty"
ROLES: Final = {
    "honest": 'role = "client"\nnamespace = "honest"',
    "flood": 'role = "client"\nnamespace = "flood"',
    "worker": 'role = "worker"',
    "flooding-worker": 'role = "worker"',
    "operator": 'role = "operator"',
}
OWN_CHANNEL: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),  # an answer of 6 MiB may be in the cache when the next flood asks
)
WORKER: Final = jobs_pb2.WorkerInfo(worker_id="w", torch_version=TORCH, hardware="cpu", fxlib_version="0.1.0")


# ------------------------------------------------------------------------------------------------------- the processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is called: the addresses of the service and of the floor."""

    service: str
    floor: str


def serve_floor(pipe: Any) -> None:
    """Serve an empty handler, until this process is killed."""
    os.sched_setaffinity(0, {SERVICE_CORE})

    async def empty(_: bytes, __: object) -> bytes:
        return b""

    class Empty(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # is generic in its stubs only
        def service(self, _: object) -> Any:
            return grpc.unary_unary_rpc_method_handler(empty)

    async def serve() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Empty(),))
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


def start(folder: Path, *options: str) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """Start a service with a policy on its core, and return its process and what it says of itself once it is ready."""
    folder.mkdir(exist_ok=True)
    policy = folder / "policy.toml"
    policy.write_text(
        "\n".join(
            f'[principals.{name}]\n{role}\ntokens_sha256 = ["{hashlib.sha256(name.encode()).hexdigest()}"]'
            for name, role in ROLES.items()
        )
    )
    addresses = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    command = [
        sys.executable,
        "-m",
        "fxlib_service",
        "--data",
        str(folder / "data"),
        "--policy",
        str(policy),
        *addresses,
        *options,
    ]
    pin = lambda: os.sched_setaffinity(0, {SERVICE_CORE})  # noqa: E731  # for a process that has not begun
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, preexec_fn=pin)  # noqa: PLW1509
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Target, dict[str, psutil.Process]]]:
    """Run a service and the floor on one core; yield the processes by arm."""
    process, ready = start(folder)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    floor = multiprocessing.get_context("spawn").Process(target=serve_floor, args=(theirs,), daemon=True)
    floor.start()
    try:
        target = Target(service=ready["listen"], floor=f"127.0.0.1:{ours.recv()}")
        yield target, {"service": psutil.Process(process.pid), "floor": psutil.Process(floor.pid)}
    finally:
        process.terminate()
        process.wait(60)
        floor.kill()


@dataclass
class Memory:
    """The peaks of a service's memory in MiB, sampled while the block runs."""

    process: psutil.Process
    own: float = 0.0
    tree: float = 0.0
    _over: Event = field(default_factory=Event)

    @contextmanager
    def sampled(self) -> Iterator[Memory]:
        """Sample twice a second for the length of the block."""
        thread = Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _sample(self) -> None:
        while True:
            self.own = max(self.own, self.process.memory_info().rss / MIB)
            pss = 0
            for each in (self.process, *self.process.children(recursive=True)):
                try:
                    pss += each.memory_full_info().pss
                except psutil.Error:  # it has just ended
                    continue
            self.tree = max(self.tree, pss / MIB)
            if self._over.wait(0.5):
                return


# ------------------------------------------------------------------------------------------------------------ callers


class Caller:
    """Calls of one principal over a connection of its own."""

    def __init__(self, target: Target, name: str) -> None:
        self.channel: Any = grpc.aio.insecure_channel(target.service, options=OWN_CHANNEL)
        self.jobs: Any = jobs_pb2_grpc.OptimizerServiceStub(self.channel)
        self.blobs: Any = blobs_pb2_grpc.BlobServiceStub(self.channel)
        self.workers: Any = workers_pb2_grpc.WorkerServiceStub(self.channel)
        self.who = (("authorization", f"Bearer {name}"),)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def put(self, data: bytes) -> None:
        """Upload a blob."""
        chunks = [blobs_pb2.WriteRequest(offset=at, data=data[at : at + MIB]) for at in range(0, len(data), MIB)]
        chunks[0].blob.CopyFrom(ref(data))
        await self.blobs.Write(iter(chunks), metadata=self.who)

    async def optimize(self, **options: Any) -> jobs_pb2.Job:
        """Ask for a job."""
        job: jobs_pb2.Job = (await self.jobs.Optimize(request(**options), metadata=self.who)).job
        return job

    async def claim(self) -> workers_pb2.Lease:
        """Wait for a job."""
        asked = workers_pb2.ClaimRequest(worker=WORKER, wait_s=30)
        lease: workers_pb2.Lease = (await self.workers.Claim(asked, metadata=self.who)).lease
        return lease

    async def complete(self, lease: workers_pb2.Lease, calls: int = 3) -> None:
        """Answer a job: the original is kept."""
        lines = [jobs_pb2.CallReport(node=f"call_{i}", action="moved", reason="r" * 80) for i in range(calls)]
        result = jobs_pb2.JobResult(
            decision=jobs_pb2.DECISION_KEEP_ORIGINAL, reason_code="NOT_FASTER", reason="it is not", calls=lines
        )
        said = workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token, result=result)
        await self.workers.Complete(said, metadata=self.who)


def ref(data: bytes) -> graph_pb2.BlobRef:
    """Return a blob's address."""
    return graph_pb2.BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def small_graph() -> bytes:
    """Return a graph of three nodes."""
    return wire.encode(symbolic_trace(nn.Linear(2, 2))).graph.SerializeToString(deterministic=True)


def large_graph(nodes: int) -> bytes:
    """Return a graph that takes long to check, with weights that were not sent."""
    graph = Graph()
    value = graph.placeholder("x")
    weight = graph.get_attr("weight")
    for _ in range(nodes):
        value = graph.call_method("add", (value, weight))
    graph.output(value)
    return wire.encode(GraphModule(nn.Linear(2, 2), graph)).graph.SerializeToString(deterministic=True)


def request(
    *, graph: bytes, fresh: bool = False, recipe: str = "schedule", namespace: str = ""
) -> jobs_pb2.OptimizeRequest:
    """Return what a launcher asks for."""
    return jobs_pb2.OptimizeRequest(
        request_id=uuid.uuid4().hex,
        namespace=namespace,
        graph=ref(graph),
        workload=workload_pb2.Workload(
            description=workload_pb2.BatchSpec(
                inputs=[workload_pb2.TensorSpec(shape=[4, 2], dtype="float32")], count=2
            ),
            loss=workload_pb2.Loss(name="mean"),
            optimizer=workload_pb2.OptimizerSpec(name="sgd", lr=0.1),
            mode=workload_pb2.STEP_MODE_LOCAL,
            threads=1,
            trainers=1,
        ),
        recipe=jobs_pb2.Recipe(name=recipe),
        torch_version=TORCH,
        fresh=fresh,
    )


async def at_rate(call: Callable[[], Awaitable[object]], rate: float, seconds: float) -> list[float]:
    """Make calls at a fixed rate, however long each takes; return their latencies in ms, from when each was due."""
    began, latencies = time.perf_counter(), list[float]()

    async def one(due: float) -> None:
        await call()
        latencies.append((time.perf_counter() - due) * 1e3)

    tasks = []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    return latencies


@asynccontextmanager
async def floor_call(target: Target) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Yield a call of the empty handler."""
    async with grpc.aio.insecure_channel(target.floor, options=OWN_CHANNEL) as channel:
        untyped: Any = channel
        call = untyped.unary_unary(FLOOR)
        yield lambda: call(b"x" * 300)


# --------------------------------------------------------------------------------------------------------- the figures


@dataclass
class Figures:
    """The rows of the whole run."""

    rows: list[Row] = field(default_factory=list)

    def add(self, load: str, arm: str, metric: str, unit: str, samples: list[float]) -> None:
        """Add a row: the median of the samples, with its interval."""
        self.rows.append(
            row(benchmark="service", case={"load": load}, arm=arm, metric=metric, unit=unit, samples=samples)
        )

    def latencies(self, load: str, arm: str, blocks: list[list[float]]) -> None:
        """Add the median and the 99th percentile of each block."""
        for metric, percent in (("p50", 50), ("p99", 99)):
            self.add(load, arm, metric, "ms", [float(np.percentile(block, percent)) for block in blocks])


async def prepare(target: Target, graph: bytes) -> None:
    """Give both tenants the answer that is cached afterwards."""
    async with Caller(target, "honest") as honest, Caller(target, "flood") as flood, Caller(target, "worker") as worker:
        for tenant in (honest, flood):
            await tenant.put(graph)
            await tenant.optimize(graph=graph)
            await worker.complete(await worker.claim())
            assert (await tenant.optimize(graph=graph)).state == jobs_pb2.JOB_STATE_SUCCEEDED


async def cached_optimize(
    target: Target, graph: bytes, figures: Figures, processes: dict[str, psutil.Process], *, quick: bool
) -> None:
    """Cached jobs at a fixed rate, and the processor time of one: its inverse is the rate that a core bears."""
    blocks: dict[str, list[list[float]]] = {"service": [], "floor": []}
    taken: dict[str, list[float]] = {"service": [], "floor": []}
    async with Caller(target, "honest") as honest, floor_call(target) as floor:
        for _ in range(3 if quick else 8):
            for arm, call in (("service", lambda: honest.optimize(graph=graph)), ("floor", floor)):
                before = processor_ms(processes[arm])
                blocks[arm].append(await at_rate(call, RATE, 2 if quick else 5))
                taken[arm].append((processor_ms(processes[arm]) - before) / len(blocks[arm][-1]))
    for arm, found in blocks.items():
        figures.latencies(f"{RATE} cached Optimize a second", arm, found)
        figures.add(f"{RATE} cached Optimize a second", arm, "processor time of one", "ms", taken[arm])


def processor_ms(process: psutil.Process) -> float:
    """Return the processor time that a process has taken until now, in ms."""
    times = process.cpu_times()
    return float(times.user + times.system) * 1e3


async def launchers(target: Target, graph: bytes, figures: Figures, *, quick: bool) -> None:
    """Launchers that start at once: each connects, and asks what the service can do, what it lacks, and for its job."""

    async def launch() -> None:
        async with Caller(target, "honest") as launcher:
            asked = jobs_pb2.GetCapabilitiesRequest()
            await launcher.jobs.GetCapabilities(asked, metadata=launcher.who, wait_for_ready=True, timeout=60)
            missing = blobs_pb2.FindMissingRequest(blobs=[ref(graph)])
            await launcher.blobs.FindMissing(missing, metadata=launcher.who, timeout=60)
            await launcher.optimize(graph=graph)

    async def empty() -> None:
        async with floor_call(target) as floor:
            for _ in range(3):
                await floor()

    name = f"{LAUNCHERS} launchers at once"
    reached, seconds = list[float](), dict[str, list[float]]({"service": [], "floor": []})
    for _ in range(1 if quick else 3):
        for arm, call in (("service", launch), ("floor", empty)):
            began = time.perf_counter()
            ends = await asyncio.gather(*(call() for _ in range(LAUNCHERS)), return_exceptions=True)
            seconds[arm].append(time.perf_counter() - began)
            if arm == "service":
                reached.append(sum(not isinstance(end, BaseException) for end in ends))
    figures.add(name, "service", "reached", "launchers", reached)
    for arm, found in seconds.items():
        figures.add(name, arm, "all served", "s", found)


async def watchers(target: Target, graph: bytes, figures: Figures, memory: Memory, *, quick: bool) -> None:
    """Watchers of one job, over ten connections: the time from a worker's report until all of them have it."""
    async with Caller(target, "honest") as honest, Caller(target, "worker") as worker:
        job = await honest.optimize(graph=graph, fresh=True)
        lease = await worker.claim()
        callers = [Caller(target, "honest") for _ in range(10)]
        asked = jobs_pb2.WatchJobRequest(job_id=job.id)
        streams = [
            each.jobs.WatchJob(asked, metadata=each.who)
            for each in itertools.islice(itertools.cycle(callers), WATCHERS)
        ]
        await asyncio.gather(*(read(stream, events=2) for stream in streams))
        delays = []
        for turn in range(5 if quick else 20):
            said = workers_pb2.ReportRequest(job_id=job.id, token=lease.token, phase="qps", progress=turn / 100)
            began = time.perf_counter()
            await worker.workers.Report(said, metadata=worker.who)
            await asyncio.gather(*(read(stream) for stream in streams))
            delays.append(time.perf_counter() - began)
        await worker.complete(lease)
        await asyncio.gather(*(read(stream) for stream in streams))
        for each in callers:
            await each.channel.close()
    figures.add(f"{WATCHERS} watchers", "service", "until all know", "s", delays)
    figures.add(f"{WATCHERS} watchers", "service", "memory", "MiB", [memory.own])


async def read(stream: Any, *, events: int = 1) -> None:
    """Take so many events off a stream."""
    for _ in range(events):
        assert isinstance(await stream.read(), jobs_pb2.WatchJobResponse)


# ---------------------------------------------------------------------------------------------------------- the floods


async def endless(call: Callable[..., Awaitable[object]], *args: object, **options: object) -> None:
    """Call again and again, whatever the answer is."""
    while True:
        try:
            await call(*args, **options)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0)


async def big_messages(target: Target) -> None:
    """120 clients, each with requests of 5 MiB."""
    callers = [Caller(target, "flood") for _ in range(120)]
    asked = jobs_pb2.OptimizeRequest(name="x" * 5 * MIB)
    await asyncio.gather(*(endless(each.jobs.Optimize, asked, metadata=each.who) for each in callers))


async def open_uploads(target: Target) -> None:
    """400 uploads that send 4 MiB, and then nothing."""

    async def part(number: int) -> AsyncIterator[blobs_pb2.WriteRequest]:
        blob = graph_pb2.BlobRef(sha256=f"{number:064x}", size=1 << 30)
        yield blobs_pb2.WriteRequest(blob=blob, data=bytes(4 * MIB))
        await asyncio.sleep(3600)

    async def upload(number: int, caller: Caller) -> None:
        await caller.blobs.Write(part(number), metadata=caller.who)

    callers = [Caller(target, "flood") for _ in range(400)]
    await asyncio.gather(*(endless(upload, number, each) for number, each in enumerate(callers)))


async def repeated_requests(target: Target) -> None:
    """Six clients that repeat one request, for a graph that takes long to check and is refused."""
    graph = large_graph(20_000)
    callers = [Caller(target, "flood") for _ in range(6)]
    await callers[0].put(graph)
    await asyncio.gather(*(endless(each.optimize, graph=graph, recipe="inference") for each in callers))


async def storm(target: Target) -> None:
    """20 clients that ask what the service can do, again and again."""
    callers = [Caller(target, "flood") for _ in range(20)]
    asked = jobs_pb2.GetCapabilitiesRequest()
    await asyncio.gather(*(endless(each.jobs.GetCapabilities, asked, metadata=each.who) for each in callers))


async def large_results(target: Target) -> None:
    """A worker that completes jobs with results of 6 MiB."""
    graph = small_graph()

    async with Caller(target, "flood") as client, Caller(target, "flooding-worker") as worker:

        async def one() -> None:
            await client.optimize(graph=graph, fresh=True)
            await worker.complete(await worker.claim(), calls=60_000)

        await endless(one)


async def _answered(target: Target, graph: bytes) -> jobs_pb2.Job:
    """Have the flood's own job answered; what equals it is answered from the cache."""
    async with Caller(target, "flood") as client, Caller(target, "flooding-worker") as worker:
        await client.put(graph)
        if (job := await client.optimize(graph=graph)).state != jobs_pb2.JOB_STATE_SUCCEEDED:
            await worker.complete(await worker.claim())
    return job


async def cached_large_graphs(target: Target) -> None:
    """20 clients that repeat a request that the cache answers, whose graph is as large as is looked at off its turn."""
    graph = large_graph(_MOST_NODES)
    assert 0.9 * MIB < len(graph) <= MIB
    await _answered(target, graph)
    callers = [Caller(target, "flood") for _ in range(20)]
    await asyncio.gather(*(endless(each.optimize, graph=graph) for each in callers))


async def live_reports(target: Target) -> None:
    """20 clients that report live figures of one job, again and again."""
    job = await _answered(target, small_graph())
    callers = [Caller(target, "flood") for _ in range(20)]
    asked = jobs_pb2.ReportLiveRequest(job_id=job.id, live=jobs_pb2.LiveFigures(qps_original=100.0, steps=1))
    await asyncio.gather(*(endless(each.jobs.ReportLive, asked, metadata=each.who) for each in callers))


FLOODS: Final = {
    "big messages": big_messages,
    "open uploads": open_uploads,
    "repeated requests": repeated_requests,
    "GetCapabilities": storm,
    "results of 6 MiB": large_results,
    "cached graphs of 1 MiB": cached_large_graphs,
    "live reports": live_reports,
}


def flood(name: str, target: Target, ready: Any) -> None:
    """Flood the service, until this process is killed; say when it begins."""
    os.sched_setaffinity(0, {CLIENT_CORE})
    os.nice(10)  # on the core that it shares with the honest client, that one comes first
    ready.set()
    asyncio.run(FLOODS[name](target))


async def flooded(
    target: Target, graph: bytes, figures: Figures, process: psutil.Process, *, name: str, quick: bool
) -> None:
    """An honest client's calls, to service and floor in turn, beside a flood."""
    memory = Memory(process)
    spawning = multiprocessing.get_context("spawn")
    ready = spawning.Event()
    flooding = spawning.Process(target=flood, args=(name, target, ready), daemon=True)
    flooding.start()
    try:
        with memory.sampled():
            await asyncio.to_thread(ready.wait)
            await asyncio.sleep(3 if quick else 8)
            blocks: dict[str, list[list[float]]] = {"service": [], "floor": []}
            async with Caller(target, "honest") as honest, floor_call(target) as floor:
                for _ in range(1 if quick else 3):
                    for arm, call in (("service", lambda: honest.optimize(graph=graph)), ("floor", floor)):
                        blocks[arm].append(await at_rate(call, HONEST_RATE, 3 if quick else 6))
    finally:
        flooding.kill()
        flooding.join()
    for arm, found in blocks.items():
        figures.latencies(f"flood: {name}", arm, found)
    figures.add(f"flood: {name}", "service", "memory", "MiB", [memory.own])
    figures.add(f"flood: {name}", "service", "memory with checks", "MiB", [memory.tree])


async def one_load(name: str, target: Target, processes: dict[str, psutil.Process], *, quick: bool) -> list[Row]:
    """Measure one load."""
    process = processes["service"]
    figures, graph, memory = Figures(), small_graph(), Memory(process)
    await prepare(target, graph)
    match name:
        case "cached":
            await cached_optimize(target, graph, figures, processes, quick=quick)
        case "launchers":
            await launchers(target, graph, figures, quick=quick)
        case "watchers":
            with memory.sampled():
                await watchers(target, graph, figures, memory, quick=quick)
        case _:
            await flooded(target, graph, figures, process, name=name, quick=quick)
    return figures.rows


def measure(name: str, quick: bool) -> list[Row]:
    """Run a service and the floor on one core, and a load, by its name, on another."""
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (target, processes):
        os.sched_setaffinity(0, {CLIENT_CORE})
        try:
            return asyncio.run(one_load(name, target, processes, quick=quick))
        finally:
            os.sched_setaffinity(0, before)


if __name__ == "__main__":
    loads = ("cached", "launchers", "watchers", *FLOODS)
    main("service", {name: partial(measure, name) for name in loads}, about=__doc__ or "")
