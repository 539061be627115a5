"""What a service bears on SQLite and on PostgreSQL, with a full store and many watchers, alone and beside others.

All services, with the processes that check, and PostgreSQL's server have one core, and everything that calls them has
another one: several services show what it costs to share a database, and not what more cores bring. The store is filled
beforehand with jobs that have ended, of 20 namespaces, and all the time streams watch a job that runs. Cached Optimize
and GetJob (of jobs picked at random) come at a fixed rate, spread over the services; their latencies count from the
moment at which a call was due. Jobs a second are those that 16 launchers hand in and follow to their end, 8 workers
claim and answer, and nobody measures. A scrape is one of `/metrics`, whose gauges are taken from the database. Memory
is that of the services and the processes that check, shared pages counting once, without the database's own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from benchmarks.report import Case, Row, main, row
from benchmarks.service import (
    CLIENT_CORE,
    MIB,
    SERVICE_CORE,
    TORCH,
    WORKER,
    Caller,
    Target,
    at_rate,
    read,
    small_graph,
    start,
)
from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_service.job import Event, Job, State
from fxlib_service.lifecycle import Transition
from fxlib_service.stores.base import NewJob
from fxlib_service.stores.postgres import PostgresJobStore
from fxlib_service.stores.sql import SqlJobStore
from tests.service.postgres import Postgres

JOBS: Final = 100_000
WATCHERS: Final = 1_000
NAMESPACES: Final = ("honest", *(f"team-{number}" for number in range(1, 20)))
LAUNCHERS, WORKERS = 16, 8
OPTIMIZE_RATE: Final = 50
GET_RATE: Final = 100
_AT_ONCE: Final = 1_000
_HEARTBEAT_S: Final = 5.0


# ----------------------------------------------------------------------------------------------------------- the store


def fill(store: SqlJobStore, jobs: int) -> list[str]:
    """Store jobs that have ended; return the ids of those of the namespace that the callers have."""
    result = jobs_pb2.JobResult(
        decision=jobs_pb2.DECISION_KEEP_ORIGINAL,
        reason_code="NOT_FASTER",
        reason="it is not",
        calls=[jobs_pb2.CallReport(node=f"call_{i}", action="moved", reason="r" * 80) for i in range(3)],
    ).SerializeToString()
    numbers = range(jobs)
    for first in range(0, jobs, _AT_ONCE):
        store.enter([_ended(number, result) for number in numbers[first : first + _AT_ONCE]])
    return [f"job-{number}" for number in numbers if NAMESPACES[number % len(NAMESPACES)] == "honest"]


def _ended(number: int, result: bytes) -> NewJob:
    at = time.time() - 3600.0
    state = State.FAILED if number % 50 == 0 else State.SUCCEEDED
    job = Job(
        id=f"job-{number}",
        request_id=f"request-{number}",
        request_digest="0" * 64,
        namespace=NAMESPACES[number % len(NAMESPACES)],
        name=f"model-{number % 997}",
        labels={"run": str(number % 100)},
        torch_version=TORCH,
        cache_key=f"{number:064x}",
        created_at=at,
        state=state,
        phase="done",
        attempts=1,
        worker_id="w",
        hardware="cpu",
        started_at=at,
        finished_at=at,
        cached=number % 2 == 0,
        reusable=True,
        last_sequence=1,
    )
    event = Event(sequence=1, at=at, state=state, phase="done", message="done")
    return NewJob(transition=Transition(job=job, event=event, result=result), request=b"r" * 400, queue_limit=1)


@contextmanager
def sqlite(folder: Path, jobs: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a full store, and the ids of the callers' jobs."""
    url = f"sqlite:///{folder / 'full.sqlite'}"
    store = SqlJobStore(url)
    ids = fill(store, jobs)
    store.close()
    yield url, ids


@contextmanager
def postgres(_: Path, jobs: int) -> Iterator[tuple[str, list[str]]]:
    """Do as `sqlite` does, with a server on the services' core that waits for the disk."""
    server = Postgres(durable=True)
    try:
        pid = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
        url = server.url()
        for each in (psutil.Process(pid), *psutil.Process(pid).children()):
            each.cpu_affinity([SERVICE_CORE])
        store = PostgresJobStore(url)
        ids = fill(store, jobs)
        store.close()
        yield url, ids
    finally:
        server.close()


# -------------------------------------------------------------------------------------------------------- the services


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services of one database.

    Attributes:
        targets: where each listens.
        metrics: the address of the metrics of the first one.
        processes: its process, of each.
        ready_s: the seconds that the slowest took to start.
    """

    targets: list[Target]
    metrics: str
    processes: list[psutil.Process]
    ready_s: float

    def memory(self) -> float:
        """Return the memory of all services in MiB."""
        total = 0
        for each in self.processes:
            for process in (each, *each.children(recursive=True)):
                with suppress(psutil.Error):  # it has just ended
                    total += process.memory_full_info().pss
        return total / MIB


@contextmanager
def running(folder: Path, url: str, services: int) -> Iterator[Services]:
    """Run so many services on one database, with one folder of blobs."""
    started, ready, seconds = list[subprocess.Popen[bytes]](), list[dict[str, str]](), list[float]()
    try:
        for number in range(services):
            began = time.perf_counter()
            shared = ("--database", url, "--blobs", str(folder / "blobs"))
            process, told = start(folder / f"service-{services}-{number}", *shared)
            seconds.append(time.perf_counter() - began)
            started.append(process)
            ready.append(told)
        yield Services(
            targets=[Target(service=each["listen"], floor="") for each in ready],
            metrics=ready[0]["metrics"],
            processes=[psutil.Process(each.pid) for each in started],
            ready_s=max(seconds),
        )
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


class Callers:
    """One principal's callers of all services, asked in turn."""

    def __init__(self, served: Services, name: str) -> None:
        self.each = [Caller(target, name) for target in served.targets]
        self._turns = itertools.cycle(self.each)

    def next(self) -> Caller:
        """Return the one whose turn it is."""
        return next(self._turns)

    async def close(self) -> None:
        """Close the connections."""
        for each in self.each:
            await each.channel.close()


# --------------------------------------------------------------------------------------------------------- the figures


@dataclass(kw_only=True)
class Figures:
    """The rows of one case."""

    case: Case
    rows: list[Row] = field(default_factory=list)

    def add(self, metric: str, unit: str, samples: list[float]) -> None:
        """Add a row: the median of the samples, with its interval."""
        self.rows.append(
            row(benchmark="stores", case=self.case, arm="service", metric=metric, unit=unit, samples=samples)
        )

    def latencies(self, what: str, blocks: list[list[float]]) -> None:
        """Add the median and the 99th percentile of each block."""
        for metric, percent in (("p50", 50), ("p99", 99)):
            self.add(f"{what} {metric}", "ms", [float(np.percentile(block, percent)) for block in blocks])


@asynccontextmanager
async def watched(served: Services, graph: bytes, watchers: int) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Have streams watch a job that runs; yield what reports on it, and returns the seconds until all of them know."""
    worker, launcher = Callers(served, "worker"), Callers(served, "honest")
    job = await launcher.next().optimize(graph=graph, fresh=True)
    lease = await worker.next().claim()
    assert lease.job_id == job.id

    async def beat() -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            caller = worker.next()
            said = workers_pb2.HeartbeatRequest(job_id=job.id, token=lease.token)
            await caller.workers.Heartbeat(said, metadata=caller.who)

    connections = [Callers(served, "honest") for _ in range(10)]
    asked = jobs_pb2.WatchJobRequest(job_id=job.id)
    callers = (each.next() for each in itertools.cycle(connections))
    streams = [each.jobs.WatchJob(asked, metadata=each.who) for each in itertools.islice(callers, watchers)]
    await asyncio.gather(*(read(stream, events=2) for stream in streams))
    beating = asyncio.create_task(beat())

    async def report() -> float:
        caller, began = worker.next(), time.perf_counter()
        said = workers_pb2.ReportRequest(job_id=job.id, token=lease.token, phase="qps")
        await caller.workers.Report(said, metadata=caller.who)
        await asyncio.gather(*(read(stream) for stream in streams))
        return time.perf_counter() - began

    try:
        yield report
    finally:
        beating.cancel()
        await worker.next().complete(lease)
        await asyncio.gather(*(read(stream) for stream in streams))
        for each in (worker, launcher, *connections):
            await each.close()


async def jobs_per_second(served: Services, graph: bytes, seconds: float) -> float:
    """Hand in jobs that must be measured, follow each to its end, and have workers answer them; return their rate."""
    launchers, workers = Callers(served, "honest"), Callers(served, "worker")
    ended, over = 0, time.perf_counter() + seconds

    async def launch() -> None:
        nonlocal ended
        while time.perf_counter() < over:
            caller = launchers.next()
            job = await caller.optimize(graph=graph, fresh=True)
            async for _ in caller.jobs.WatchJob(jobs_pb2.WatchJobRequest(job_id=job.id), metadata=caller.who):
                pass
            ended += 1

    async def work() -> None:
        while True:
            caller = workers.next()
            asked = workers_pb2.ClaimRequest(worker=WORKER, wait_s=30)
            told = await caller.workers.Claim(asked, metadata=caller.who)
            if told.HasField("lease"):
                await caller.complete(told.lease)

    began = time.perf_counter()
    working = [asyncio.create_task(work()) for _ in range(WORKERS)]
    await asyncio.gather(*(launch() for _ in range(LAUNCHERS)))
    took = time.perf_counter() - began
    for each in working:
        each.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    for callers in (launchers, workers):
        await callers.close()
    return ended / took


def scrape(address: str) -> float:
    """Return the milliseconds that the page of metrics takes."""
    asked = urllib.request.Request(f"http://{address}/metrics", headers={"Authorization": "Bearer operator"})
    began = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=60) as page:  # noqa: S310  # our own address
        assert b"fxlib_database_up 1.0" in page.read()
    return (time.perf_counter() - began) * 1e3


async def measure_services(served: Services, ids: list[str], figures: Figures, watchers: int, *, quick: bool) -> None:
    """Measure everything on some services."""
    graph, turns, seconds = small_graph(), 2 if quick else 5, 2.0 if quick else 6.0
    honest, worker = Callers(served, "honest"), Callers(served, "worker")
    await honest.next().put(graph)
    await honest.next().optimize(graph=graph, fresh=True)
    await worker.next().complete(await worker.next().claim())
    blocks: dict[str, list[list[float]]] = {"cached Optimize": [], "GetJob": []}

    async def get() -> None:
        caller = honest.next()
        await caller.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=random.choice(ids)), metadata=caller.who)

    calls = {
        "cached Optimize": (lambda: honest.next().optimize(graph=graph), OPTIMIZE_RATE),
        "GetJob": (get, GET_RATE),
    }
    async with watched(served, graph, watchers) as report:
        for call, rate in calls.values():
            await at_rate(call, rate, 1.0)  # what is done once is done
        for _, (what, (call, rate)) in itertools.product(range(turns), calls.items()):
            blocks[what].append(await at_rate(call, rate, seconds))
        for what, found in blocks.items():
            figures.latencies(what, found)
        figures.add("jobs a second", "", [await jobs_per_second(served, graph, seconds) for _ in range(turns)])
        figures.add("until all watchers know", "s", [await report() for _ in range(turns)])
        scrapes = [await asyncio.to_thread(scrape, served.metrics) for _ in range(turns)]
        figures.add("scrape", "ms", scrapes)
        figures.add("memory", "MiB", [served.memory()])
    figures.add("ready after", "s", [served.ready_s])
    for each in (honest, worker):
        await each.close()


@dataclass(frozen=True, kw_only=True)
class Part:
    """One case: a kind of store, and the number of services on it."""

    store: str
    services: int

    def __call__(self, quick: bool) -> list[Row]:
        """Fill a store, and measure its services; with `quick`, on fewer jobs and watchers."""
        jobs, watchers = (JOBS // 10, WATCHERS // 5) if quick else (JOBS, WATCHERS)
        made = postgres if self.store == "PostgreSQL" else sqlite
        figures = Figures(case={"store": self.store, "services": self.services, "jobs": jobs, "watchers": watchers})
        before = os.sched_getaffinity(0)
        with (
            tempfile.TemporaryDirectory() as temporary,
            made(Path(temporary), jobs) as (url, ids),
            running(Path(temporary), url, self.services) as served,
        ):
            os.sched_setaffinity(0, {CLIENT_CORE})
            try:
                asyncio.run(measure_services(served, ids, figures, watchers, quick=quick))
            finally:
                os.sched_setaffinity(0, before)
        return figures.rows


PARTS: Final = {
    "sqlite-1": Part(store="SQLite", services=1),
    **{f"postgresql-{count}": Part(store="PostgreSQL", services=count) for count in (1, 2, 4)},
}

if __name__ == "__main__":
    main("stores", PARTS, about=__doc__ or "")
