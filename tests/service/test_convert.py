"""What the service keeps, as the protocol's messages tell it."""

from dataclasses import replace

import pytest

from fxlib import protocol
from fxlib.v1 import jobs_pb2
from fxlib_service.convert import event_to_proto, filter_from_proto, job_to_proto, worker_from_proto, worker_to_proto
from fxlib_service.errors import ServiceError
from fxlib_service.job import Event, Failure, Job, State
from fxlib_service.stores.base import Filter, Worker

JOB = Job(
    id="j1",
    request_id="r1",
    request_digest="0" * 64,
    namespace="ads",
    name="clicks",
    labels={"team": "ads"},
    torch_version="2.13.0",
    cache_key="key",
    created_at=1_700_000_000.25,
    attempts=2,
    worker_id="w1",
    last_sequence=7,
)


def test_a_job_is_told_as_its_client_reads_it() -> None:
    failure = Failure(code="WORKER_LOST", message="gone")
    ended = replace(JOB, state=State.FAILED, started_at=1_700_000_001.0, finished_at=1_700_000_002.5, failure=failure)
    read = protocol.job_from_proto(job_to_proto(ended))
    assert (read.id, read.name, read.labels, read.state, read.attempts) == (
        "j1",
        "clicks",
        {"team": "ads"},
        "failed",
        2,
    )
    assert read.finished_at is not None
    assert read.finished_at.timestamp() == 1_700_000_002.5
    assert read.failure is not None
    assert (read.failure.code, read.failure.message) == ("WORKER_LOST", "gone")


def test_a_job_that_has_not_begun_has_no_times_and_no_failure() -> None:
    message = job_to_proto(JOB)
    assert [name for name in ("started_at", "finished_at", "failure", "result") if message.HasField(name)] == []


def test_an_event_is_told_as_its_client_reads_it() -> None:
    event = Event(sequence=3, at=1.5, state=State.RUNNING, phase="qps", message="half", progress=0.5)
    read = protocol.event_from_proto(event_to_proto(event))
    assert (read.sequence, read.at.timestamp(), read.state, read.progress) == (3, 1.5, "running", 0.5)
    assert protocol.event_from_proto(event_to_proto(replace(event, progress=-1.0))).progress is None


def test_a_worker_reads_as_it_was_written_but_for_when_it_was_seen() -> None:
    worker = Worker(
        id="w",
        torch_version="2.13.0",
        hardware="4 cores",
        fxlib_version="0.1",
        allowed_modules=("a", "b"),
        containment="isolated",
    )
    assert worker_from_proto(worker_to_proto(replace(worker, seen_at=3.0))) == worker


def test_a_filter_names_each_state_once_and_refuses_what_is_none() -> None:
    states = [jobs_pb2.JOB_STATE_QUEUED, jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_QUEUED]
    message = jobs_pb2.ListJobsRequest(namespace="ads", states=states, labels={"a": "b"}, page_size=3)
    wanted = Filter(namespace="ads", states=(State.QUEUED, State.FAILED), labels={"a": "b"})
    assert filter_from_proto(message) == wanted
    message.MergeFromString(bytes([3 << 3, 99]))  # a state that this version does not know
    with pytest.raises(ServiceError) as refused:
        filter_from_proto(message)
    assert refused.value.violations[0].field == "states"
