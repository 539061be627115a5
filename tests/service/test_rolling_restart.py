"""Two services on one database are killed and started again, one after the other, while jobs run and are watched."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from fxlib.client.connection import Connection, Deadline
from fxlib.client.watch_job import follow
from fxlib.errors import RejectedError
from fxlib.spec.job import Event, Job
from fxlib.v1 import blobs_pb2, workers_pb2, workers_pb2_grpc
from tests.service.postgres import Postgres
from tests.service.support import Process, answer, eventually, graph_bytes, ref, request, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOBS = 14
NAMES = ("here", "there")


class Fleet:
    """Two services, whose clients and workers know both addresses; and what workers and watchers have met."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.token = folder / "token"
        self.token.write_text("r" * 40)
        shared = {"--database": url, "--blobs": str(folder / "blobs"), "--token-file": str(self.token)}
        self._options = [each for pair in shared.items() for each in pair]
        self.services = [self._start(name, "127.0.0.1:0") for name in NAMES]
        self.ends = [each.listen for each in self.services]
        self.claims: list[tuple[str, int]] = []
        self.accepted: list[str] = []
        self.seen: defaultdict[str, list[Event]] = defaultdict(list)

    def connect(self, turn: int) -> Connection:
        target = ",".join((self.ends[turn % 2], self.ends[1 - turn % 2]))
        return Connection(f"ipv4:{target}", token_file=self.token, insecure=True)

    def work(self, turn: int) -> None:
        """Do jobs as a worker, whose calls are made again, at whichever service is there, until all are done."""
        with closing(self.connect(turn)) as connection:
            stub = connection.stub(workers_pb2_grpc.WorkerServiceStub)

            def call(method: str, asked: Message) -> Any:
                return connection.call(
                    method, lambda left_s: getattr(stub, method)(asked, timeout=left_s), Deadline(200)
                )

            while len(self.accepted) < JOBS:
                told = call("Claim", workers_pb2.ClaimRequest(worker=worker(f"w{turn}"), wait_s=0.5))
                if not told.HasField("lease"):
                    continue
                lease = {"job_id": told.lease.job_id, "token": told.lease.token}
                self.claims.append((told.lease.job_id, told.lease.attempt))
                with suppress(RejectedError):  # LEASE_LOST: then another worker has it
                    for _ in range(4):
                        call("Report", workers_pb2.ReportRequest(**lease, phase="qps"))
                        time.sleep(0.1)
                    call("Complete", workers_pb2.CompleteRequest(**lease, result=answer()))
                    self.accepted.append(told.lease.job_id)

    def watch(self, turn: int, job_id: str) -> Job:
        with closing(self.connect(turn)) as connection:
            return follow(connection, job_id, Deadline(500), self.seen[job_id].append)

    def restart(self, number: int) -> None:
        """Kill a service, and start it again once the other one has seen some jobs done."""
        enough = min(len(self.accepted) + 3, JOBS)
        self.services[number].kill()
        for _ in eventually():
            if len(self.accepted) >= enough:
                break
        self.services[number] = self._start(NAMES[number], self.ends[number])

    def close(self) -> None:
        for each in self.services:
            each.kill()

    def _start(self, name: str, listen: str) -> Process:
        return Process(self.folder / name, *self._options, "--tcp-only", "--lease-seconds", "15", "--listen", listen)


def test_a_rolling_restart_loses_nothing_and_doubles_nothing(postgres: Postgres, tmp_path: Path) -> None:
    fleet = Fleet(postgres.url(), tmp_path)
    try:
        with closing(fleet.connect(0)) as connection, ThreadPoolExecutor(JOBS + 3) as pool:
            data = graph_bytes()
            connection.blobs.Write(iter([blobs_pb2.WriteRequest(blob=ref(data), data=data)]))
            jobs = [connection.jobs.Optimize(request(fresh=True)).job.id for _ in range(JOBS)]
            watched = [pool.submit(fleet.watch, turn, job_id) for turn, job_id in enumerate(jobs)]
            working = [pool.submit(fleet.work, turn) for turn in range(3)]
            fleet.restart(0)
            fleet.restart(1)
            ended = [each.result() for each in watched]
            assert [each.result() for each in working] == [None] * 3
    finally:
        fleet.close()
    assert [job.state for job in ended] == ["succeeded"] * JOBS
    assert sorted(fleet.accepted) == sorted(jobs)
    assert len(set(fleet.claims)) == len(fleet.claims)
    for events in (fleet.seen[job_id] for job_id in jobs):
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert [event.state for event in events].count("succeeded") == 1
