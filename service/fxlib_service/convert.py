"""Converts jobs, events and workers to and from their protocol messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fxlib.errors import WireError
from fxlib.protocol import state_from_proto, state_to_proto
from fxlib.protocol.converter import Converter
from fxlib.protocol.converter import FieldRule as Rule
from fxlib.protocol.jobs import FAILURE
from fxlib.v1 import graph_pb2, jobs_pb2
from fxlib_service.blobs.base import Blob
from fxlib_service.errors import ServiceError, Violation, invalid
from fxlib_service.job import Event, Job, State
from fxlib_service.stores.base import Filter, Worker

_IN_LISTINGS: Final = ("decision", "reason_code", "reason", "qps_original", "qps_optimized", "gain")


def job_to_proto(job: Job, result: bytes | None = None, live: bytes | None = None) -> jobs_pb2.Job:
    """Write a job, with its serialized answer and live figures if they are given."""
    proto = _JOB.write(job)
    if result is not None:
        proto.result.MergeFromString(result)
    if live is not None:
        proto.live.MergeFromString(live)
    return proto


def job_to_line(job: Job, result: bytes | None, live: bytes | None) -> jobs_pb2.Job:
    """Write a job as a listing shows it, with only the decision, the reason and the figures of its answer."""
    proto = job_to_proto(job, result, live)
    for field, _ in proto.result.ListFields() if result is not None else ():
        if field.name not in _IN_LISTINGS:
            proto.result.ClearField(field.name)
    return proto


def event_to_proto(event: Event) -> jobs_pb2.JobEvent:
    """Write an event of a job's history."""
    return _EVENT.write(event)


def worker_to_proto(worker: Worker) -> jobs_pb2.WorkerInfo:
    """Write a worker."""
    return _WORKER.write(worker)


def worker_from_proto(proto: jobs_pb2.WorkerInfo) -> Worker:
    """Read a worker. `seen_at` is not part of the message."""
    return _WORKER.read(proto)


def filter_from_proto(proto: jobs_pb2.ListJobsRequest) -> Filter:
    """Read the filter of a listing.

    Raises:
        ServiceError: INVALID_REQUEST, if a state is unknown.
    """
    return _FILTER.read(proto)


def blob_from_proto(proto: graph_pb2.BlobRef, field: str = "blob") -> Blob:
    """Read a reference to a blob.

    Raises:
        ServiceError: INVALID_REQUEST, if it is not valid; names the field within `field`.
    """
    try:
        return Blob(sha256=proto.sha256, size=proto.size)
    except ServiceError as error:
        violations = [Violation(field=f"{field}.{each.field}", problem=each.problem) for each in error.violations]
        raise ServiceError(error.code, violations=violations) from None


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def _states(numbers: Iterable[jobs_pb2.JobState]) -> tuple[State, ...]:
    try:
        return tuple(dict.fromkeys(State(state_from_proto(number)) for number in numbers))
    except WireError as error:
        raise invalid("states", str(error)) from None


_TIME: Final = Rule(_timestamp)
_STATE: Final = Rule(state_to_proto)
_JOB: Final = Converter(
    Job,
    jobs_pb2.Job,
    text=None,
    rules={"state": _STATE, "created_at": _TIME, "started_at": _TIME, "finished_at": _TIME, "failure": FAILURE},
    # Fields that only the service has, and the answer, which is stored separately.
    left_out=(
        *("request_digest", "torch_version", "cache_key", "fresh", "token", "hardware", "reusable"),
        *("asked_from", "result", "live", "waits_for"),
    ),
)
_EVENT: Final = Converter(Event, jobs_pb2.JobEvent, text=None, number=None, rules={"at": _TIME, "state": _STATE})
_WORKER: Final = Converter(
    Worker,
    jobs_pb2.WorkerInfo,
    text=None,
    left_out=("id", "worker_id", "seen_at"),
    write_more=lambda worker: {"worker_id": worker.id},
    read_more=lambda proto: {"id": proto.worker_id},
)
_FILTER: Final = Converter(
    Filter,
    jobs_pb2.ListJobsRequest,
    text=None,
    rules={"states": Rule(read=_states)},
    left_out=("page_size", "page_token", "oldest_first"),
)
