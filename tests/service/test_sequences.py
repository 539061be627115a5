"""Sequences of calls that no honest client makes: the service fails at none of them, and mixes up no tenants.

Several principals call every method over real sockets, in any order, with ids that belong to others, messages that were
changed field by field, bytes that are no message, streams that break off, and deadlines that are over at once. The test
keeps books of its own of what each tenant sent, and holds each answer to them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from fxlib.v1 import blobs_pb2, blobs_pb2_grpc, jobs_pb2, jobs_pb2_grpc, workers_pb2, workers_pb2_grpc
from fxlib_service.job import State
from tests.fuzz.messages import mutate
from tests.service.principals import bearer, write_policy
from tests.service.support import Process, answer, graph_bytes, ref, request, states, worker

LONG = os.environ.get("FXLIB_SEQUENCES", "")
"""How many sequences the long run has, each time others; without it, the same few are run."""
NEVER = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED})
ENDED = frozenset(each.value for each in State if each.finished)
CLIENTS = ("ads", "web")
EVERYBODY = (*CLIENTS, "ads-viewer", "viewer", "worker", "worker-2", "operator", "")
SEES_ALL = ("viewer", "operator", "worker", "worker-2")
DATA = (*(graph_bytes(width) for width in (2, 3, 4)), b"", b"x" * 10, b"weights" * 20_000)
TEXTS = (
    "",
    "default",
    "ads",
    "web",
    "r1",
    "r2",
    "r3",
    "queued",
    "w1",
    "../x",
    "\x1b[2J",
    "a" * 300,
    "2.13.0",
    "schedule",
)

who = st.sampled_from(EVERYBODY)
client = st.sampled_from(CLIENTS)
workers = st.sampled_from(("worker", "worker-2"))
data = st.sampled_from(DATA)
seeds = st.integers(0, 1 << 32)
picks = st.integers(0, 1 << 16)
damage = st.sampled_from((0, 0, 0, 1, 2, 4))
patience_s = st.sampled_from((60.0, 60.0, 60.0, 60.0, 0.01, 0.0))


class Books:
    """What was sent and answered so far, over all sequences: the service goes on between them."""

    def __init__(self, service: Process) -> None:
        self.channel = grpc.insecure_channel(service.listen)
        self.optimizer: Any = jobs_pb2_grpc.OptimizerServiceStub(self.channel)
        self.blobs: Any = blobs_pb2_grpc.BlobServiceStub(self.channel)
        self.workers: Any = workers_pb2_grpc.WorkerServiceStub(self.channel)
        self.owners: dict[str, str] = {}
        """Namespaces of jobs, by id."""
        self.final: dict[str, str] = {}
        """States of jobs that have ended, by id."""
        self.sent: set[tuple[str, str]] = set()
        """Namespaces, and digests of blobs that they sent or were answered with."""
        self.leases: list[tuple[str, str, str]] = []
        """Job, token and holder of each lease that was granted."""

    def note(self, caller: str, jobs: Sequence[jobs_pb2.Job]) -> None:
        """Hold jobs that a caller was shown to the books."""
        for job, state in zip(jobs, states(jobs), strict=True):
            assert self.owners.setdefault(job.id, job.namespace) == job.namespace, "a job changed its namespace"
            assert caller in SEES_ALL or job.namespace == caller.removesuffix("-viewer"), "another tenant's job"
            assert self.final.get(job.id, state) == state, f"a job went from {self.final[job.id]} to {state}"
            assert job.HasField("result") <= (state == "succeeded")
            if state in ENDED:
                self.final[job.id] = state
            for each in (job.result, *(variant.result for variant in job.result.variants)):
                if each.HasField("graph"):
                    self.sent.add((job.namespace, each.graph.sha256))

    def close(self) -> None:
        self.channel.close()


class Sequences(RuleBasedStateMachine):
    """Calls, in any order."""

    books: ClassVar[Books]

    def call(self, method: Any, asked: Any, caller: str, timeout_s: float = 60.0) -> Any:
        """Call a method; return its answer, None where it was refused, or the status of a broken stream."""
        try:
            return method(asked, metadata=bearer(caller), timeout=timeout_s)
        except grpc.FutureCancelledError:
            return None
        except grpc.RpcError as error:
            refusal = error
        assert refusal.code() not in NEVER, f"{refusal.code()}: {refusal.details()}"
        return None

    def changed(self, message: Message, seed: int, changes: int) -> Any:
        rng = random.Random(seed)
        for _ in range(changes):
            mutate(message, rng, TEXTS)
        return message

    def job(self, pick: int) -> str:
        """Return the id of some job, of whatever tenant, or one that there is not."""
        known = [*self.books.owners, "no-such-job", ""]
        return known[pick % len(known)]

    # ----------------------------------------------------------------------------------------------------- launchers

    @rule(caller=who, content=data, name=st.sampled_from(("r1", "r2", "r3")), fresh=st.booleans(), seed=seeds,
          changes=damage, namespace=st.sampled_from(("", "ads", "web")), timeout_s=patience_s)  # fmt: skip
    def optimize(
        self,
        *,
        caller: str,
        content: bytes,
        name: str,
        fresh: bool,
        seed: int,
        changes: int,
        namespace: str,
        timeout_s: float,
    ) -> None:
        asked = request(graph=content, request_id=name + str(seed % 7), fresh=fresh, namespace=namespace)
        told = self.call(self.books.optimizer.Optimize, self.changed(asked, seed, changes), caller, timeout_s)
        if told is not None:
            self.books.note(caller, [told.job])

    @rule(caller=who, pick=picks)
    def get(self, caller: str, pick: int) -> None:
        told = self.call(self.books.optimizer.GetJob, jobs_pb2.GetJobRequest(job_id=self.job(pick)), caller)
        if told is not None:
            self.books.note(caller, [told.job])

    @rule(caller=who, pick=picks)
    def cancel(self, caller: str, pick: int) -> None:
        told = self.call(self.books.optimizer.CancelJob, jobs_pb2.CancelJobRequest(job_id=self.job(pick)), caller)
        if told is not None:
            self.books.note(caller, [told.job])

    @rule(caller=who, pick=picks, name=st.sampled_from(("r1", "r2", "r4", "")), seed=seeds, changes=damage,
          timeout_s=patience_s)  # fmt: skip
    def retry(self, *, caller: str, pick: int, name: str, seed: int, changes: int, timeout_s: float) -> None:
        asked = jobs_pb2.RetryJobRequest(job_id=self.job(pick), request_id=name and name + str(seed % 7))
        told = self.call(self.books.optimizer.RetryJob, self.changed(asked, seed, changes), caller, timeout_s)
        if told is not None:
            self.books.note(caller, [told.job])

    @rule(caller=who, pick=picks, went_back=st.booleans(), seed=seeds, changes=damage, timeout_s=patience_s)
    def report_live(
        self, *, caller: str, pick: int, went_back: bool, seed: int, changes: int, timeout_s: float
    ) -> None:
        gain = jobs_pb2.Estimate(value=0.4, low=0.3, high=0.5)
        live = jobs_pb2.LiveFigures(qps_original=100, qps_optimized=140, gain=gain, steps=seed, went_back=went_back)
        asked = self.changed(jobs_pb2.ReportLiveRequest(job_id=self.job(pick), live=live), seed, changes)
        told = self.call(self.books.optimizer.ReportLive, asked, caller, timeout_s)
        owner = self.books.owners.get(asked.job_id)
        assert told is None or caller in ("operator", owner), f"{caller} reports on a job of {owner}"

    @rule(caller=who, seed=seeds, changes=damage)
    def list_jobs(self, caller: str, seed: int, changes: int) -> None:
        asked = jobs_pb2.ListJobsRequest(page_size=5, states=[jobs_pb2.JOB_STATE_QUEUED], labels={"a": "b"})
        told = self.call(self.books.optimizer.ListJobs, self.changed(asked, seed, changes), caller)
        if told is not None:
            self.books.note(caller, told.jobs)

    @rule(caller=who, pick=picks, after=st.sampled_from((0, 1, 2, 5, 1 << 31)), most=st.integers(0, 4),
          timeout_s=st.sampled_from((0.0, 0.05, 0.2)))  # fmt: skip
    def watch(self, caller: str, pick: int, after: int, most: int, timeout_s: float) -> None:
        job_id = self.job(pick)
        asked = jobs_pb2.WatchJobRequest(job_id=job_id, after_sequence=after)
        stream = self.books.optimizer.WatchJob(asked, metadata=bearer(caller), timeout=timeout_s)
        for number, told in enumerate(self.read(stream, most)):
            assert told.event.sequence == max(after, 0) + 1 + number
            assert caller in SEES_ALL or self.books.owners[job_id] == caller.removesuffix("-viewer")

    @rule(caller=who)
    def ask_what_there_is(self, caller: str) -> None:
        self.call(self.books.optimizer.GetCapabilities, jobs_pb2.GetCapabilitiesRequest(), caller)
        self.call(self.books.optimizer.ListPasses, jobs_pb2.ListPassesRequest(), caller)

    # --------------------------------------------------------------------------------------------------------- blobs

    @rule(caller=who, content=data, cut=st.sampled_from((1, 7, 50_000)), wrong=st.booleans(), seed=seeds,
          changes=damage, breaks=st.booleans(), timeout_s=patience_s)  # fmt: skip
    def write(
        self,
        *,
        caller: str,
        content: bytes,
        cut: int,
        wrong: bool,
        seed: int,
        changes: int,
        breaks: bool,
        timeout_s: float,
    ) -> None:
        rng = random.Random(seed)
        size = max(len(content), 1) if cut == 1 else cut
        parts = [content[at : at + size] for at in range(0, len(content), size)][:40] or [b""]
        if wrong:
            parts[rng.randrange(len(parts))] = b"another"
        offset, messages = 0, []
        for part in parts:
            messages.append(blobs_pb2.WriteRequest(blob=ref(content), offset=offset, data=part))
            offset += len(part)
        if changes:
            mutate(rng.choice(messages), rng, TEXTS)

        calls: list[Any] = []

        def stream() -> Iterator[blobs_pb2.WriteRequest]:
            for number, each in enumerate(messages):
                if breaks and number == len(messages) // 2 and calls:
                    calls[0].cancel()
                    return
                yield each

        def call(*_: Any, **options: Any) -> Any:
            calls.append(self.books.blobs.Write.future(stream(), **options))
            return calls[0].result()

        told = self.call(call, None, caller, timeout_s)
        # What a call came to that was cancelled, or ran out of time, nobody knows.
        if (told is None and not wrong) or (told is not None and told.committed_bytes == len(content)):
            self.books.sent.add((caller, ref(content).sha256))

    @rule(caller=who, content=data, offset=st.sampled_from((0, 1, 100_000, 1 << 40, -1)), most=st.integers(0, 3))
    def read_blob(self, caller: str, content: bytes, offset: int, most: int) -> None:
        asked = blobs_pb2.ReadRequest(blob=ref(content), offset=offset)
        stream = self.books.blobs.Read(asked, metadata=bearer(caller), timeout=60)
        got = b"".join(each.data for each in self.read(stream, most))
        if got:
            assert content[max(offset, 0) :].startswith(got)
            assert caller not in CLIENTS or (caller, ref(content).sha256) in self.books.sent, "another tenant's blob"

    @rule(caller=who, seed=seeds, changes=damage)
    def ask_of_blobs(self, caller: str, seed: int, changes: int) -> None:
        asked = blobs_pb2.FindMissingRequest(blobs=map(ref, DATA))
        told = self.call(self.books.blobs.FindMissing, self.changed(asked, seed, changes), caller)
        if told is not None and caller in CLIENTS and not changes:
            there = {each.sha256 for each in asked.blobs} - {each.sha256 for each in told.missing}
            assert {(caller, each) for each in there} <= self.books.sent, "another tenant's blob is told of"
        query = self.changed(blobs_pb2.QueryWriteRequest(blob=ref(DATA[seed % len(DATA)])), seed, changes)
        self.call(self.books.blobs.QueryWrite, query, caller)

    # ------------------------------------------------------------------------------------------------------- workers

    @rule(caller=st.sampled_from(("worker", "worker", "worker-2", "ads")), seed=seeds, changes=damage,
          timeout_s=patience_s)  # fmt: skip
    def claim(self, caller: str, seed: int, changes: int, timeout_s: float) -> None:
        asked = self.changed(workers_pb2.ClaimRequest(worker=worker(caller), wait_s=0), seed, changes)
        asked.wait_s = min(asked.wait_s, 0.05)  # NaN and what is negative stay
        told = self.call(self.books.workers.Claim, asked, caller, timeout_s)
        if told is not None and told.HasField("lease"):
            assert caller != "ads"
            assert told.lease.job_id not in self.books.final, "a job that had ended was leased"
            self.books.owners.setdefault(told.lease.job_id, told.lease.request.namespace)
            self.books.leases.append((told.lease.job_id, told.lease.token, caller))

    @rule(caller=who, pick=picks, method=st.sampled_from(("Heartbeat", "Report", "Complete", "Release")), seed=seeds,
          changes=damage, fails=st.booleans(), token=st.sampled_from(("own", "own", "own", "", "guessed")))  # fmt: skip
    def hold(self, *, caller: str, pick: int, method: str, seed: int, changes: int, fails: bool, token: str) -> None:
        job_id, own, holder = self.books.leases[pick % len(self.books.leases)] if self.books.leases else ("a", "b", "")
        lease: dict[str, Any] = {"job_id": job_id, "token": own if token == "own" else token}
        caller = holder if pick % 3 and holder else caller
        ended: dict[str, Any] = (
            {"failure": jobs_pb2.JobFailure(code="LOST", message="m")} if fails else {"result": self.answered(seed)}
        )
        asked: dict[str, Callable[[], Message]] = {
            "Heartbeat": lambda: workers_pb2.HeartbeatRequest(**lease),
            "Report": lambda: workers_pb2.ReportRequest(**lease, phase="qps", message="half", progress=0.5),
            "Complete": lambda: workers_pb2.CompleteRequest(**lease, **ended),
            "Release": lambda: workers_pb2.ReleaseRequest(**lease),
        }
        message = self.changed(asked[method](), seed, changes)
        told = self.call(getattr(self.books.workers, method), message, caller)
        assert told is None or caller == holder or changes, f"{caller} acts under the lease of {holder or 'nobody'}"

    def answered(self, seed: int) -> jobs_pb2.JobResult:
        result = answer(reason="FASTER" if seed % 2 else "NOT_FASTER")
        if seed % 2:
            result.graph.CopyFrom(ref(DATA[seed % 4]))
        return result

    # ------------------------------------------------------------------------------------------------------ anything

    @rule(caller=who, method=st.sampled_from(sorted(
        f"{service.full_name}/{each.name}" for module in (jobs_pb2, blobs_pb2, workers_pb2)
        for service in module.DESCRIPTOR.services_by_name.values() for each in service.methods)),
        garbage=st.binary(max_size=60), times=st.integers(0, 3))  # fmt: skip
    def send_bytes(self, caller: str, method: str, garbage: bytes, times: int) -> None:
        if method.endswith("/Claim"):
            garbage = b"\xff" + garbage  # what can be read as a claim may wait for a minute
        any_bytes: Any = self.books.channel.stream_stream
        call = any_bytes(f"/{method}")
        stream = call(iter([garbage] * times), metadata=bearer(caller), timeout=5.0)
        self.read(stream, 2, more=frozenset({"Missing request", "too many", "More than one"}))

    def read(self, stream: Any, most: int, more: frozenset[str] = frozenset()) -> list[Any]:
        """Read so many messages of a stream and cancel it."""
        found: list[Any] = []
        try:
            while len(found) < most:
                found.append(next(stream))
            return found
        except StopIteration:
            return found
        except grpc.RpcError as error:
            refusal = error
        finally:
            stream.cancel()
        # gRPC itself answers so to streams that are none, before the service hears of them.
        known = any(each.lower() in str(refusal.details()).lower() for each in more)
        assert known or refusal.code() not in NEVER, f"{refusal.code()}: {refusal.details()}"
        return found

    def teardown(self) -> None:
        """Serve an honest client, whatever happened before; and leave no full queue to the next sequence."""
        graph = graph_bytes()
        for caller in CLIENTS:
            asked = jobs_pb2.ListJobsRequest(states=[jobs_pb2.JOB_STATE_QUEUED], page_size=500)
            for each in self.books.optimizer.ListJobs(asked, metadata=bearer(caller), timeout=60).jobs:
                self.cancel_now(caller, each.id)
            told = self.books.blobs.Write(
                iter([blobs_pb2.WriteRequest(blob=ref(graph), data=graph)]), metadata=bearer(caller), timeout=60
            )
            assert told.committed_bytes == len(graph)
            self.books.sent.add((caller, ref(graph).sha256))
            honest = request(graph=graph, fresh=True)
            job = self.books.optimizer.Optimize(honest, metadata=bearer(caller), timeout=60).job
            assert states([job]) == ["queued"]
            assert job.namespace == caller
            self.cancel_now(caller, job.id)

    def cancel_now(self, caller: str, job_id: str) -> None:
        asked = jobs_pb2.CancelJobRequest(job_id=job_id)
        job = self.books.optimizer.CancelJob(asked, metadata=bearer(caller), timeout=60).job
        assert states([job])[0] in ENDED
        self.books.note(caller, [job])


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Books]:
    folder: Path = tmp_path_factory.mktemp("sequences")
    service = Process(folder / "data", "--policy", str(write_policy(folder)), "--lease-seconds", "2")
    found = Books(service)
    try:
        yield found
    finally:
        found.close()
        assert service.stop() == 0
    log = (folder / "data.log").read_text()
    assert "Traceback" not in log, log[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(36_000 if LONG else 300)
def test_many_sequences_of_any_calls_break_nothing(books: Books) -> None:
    Sequences.books, sequences = books, int(LONG or "8")
    chosen = settings(max_examples=sequences, stateful_step_count=25, deadline=None, derandomize=not LONG,
                      database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
    run_state_machine_as_test(Sequences, settings=chosen)
    assert any(state == "succeeded" for state in books.final.values()) or sequences < 1000  # few reach an answer
