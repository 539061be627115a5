"""What the service keeps, as the protocol's messages tell it."""

from dataclasses import fields, replace

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from fxlib import protocol
from fxlib.spec.job import JobFailure, JobFilter
from fxlib.v1 import jobs_pb2
from fxlib_service.convert import event_message, filter_from_proto, job_message, worker_from_proto, worker_to_proto
from fxlib_service.errors import ServiceError
from fxlib_service.job import Event, Job, State
from fxlib_service.stores.base import Worker

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
    failure = JobFailure(code="WORKER_LOST", message="gone")
    ended = replace(JOB, state=State.FAILED, started_at=1_700_000_001.0, finished_at=1_700_000_002.5, failure=failure)
    read = protocol.job_from_proto(job_message(ended))
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


def test_a_client_reads_each_field_that_a_stored_job_and_its_own_have_in_common() -> None:
    stored = replace(JOB, phase="qps", where={"gpu": "h100"}, cached=True, asked_by="a", measured_by="b")
    read = protocol.job_from_proto(job_message(stored))
    common = {each.name for each in fields(Job)} & {each.name for each in fields(read)}
    common -= {"state", "created_at", "started_at", "finished_at"}
    assert {"id", "labels", "where", "measured_by", "failure"} <= common
    assert {name: getattr(read, name) for name in common} == {name: getattr(stored, name) for name in common}


@given(st.floats(0, 4e9))
def test_a_time_is_written_to_the_nearest_microsecond(seconds: float) -> None:
    expected = Timestamp()
    expected.FromMicroseconds(round(seconds * 1e6))
    assert job_message(replace(JOB, created_at=seconds)).created_at == expected


def test_a_job_that_has_not_begun_has_no_times_and_no_failure() -> None:
    message = job_message(JOB)
    assert [name for name in ("started_at", "finished_at", "failure", "result") if message.HasField(name)] == []


def test_an_event_is_told_as_its_client_reads_it() -> None:
    event = Event(sequence=3, at=1.5, state=State.RUNNING, phase="qps", message="half", progress=0.5)
    read = protocol.event_from_proto(event_message(event))
    assert (read.sequence, read.at.timestamp(), read.state, read.progress) == (3, 1.5, "running", 0.5)
    assert protocol.event_from_proto(event_message(replace(event, progress=-1.0))).progress is None


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
    wanted = JobFilter(namespace="ads", states=("queued", "failed"), labels={"a": "b"})
    assert filter_from_proto(message) == wanted
    message.MergeFromString(bytes([3 << 3, 99]))  # a state that this version does not know
    with pytest.raises(ServiceError) as refused:
        filter_from_proto(message)
    assert refused.value.violations[0].field == "states"
