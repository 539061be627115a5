"""Passes what the service stores to the library's converters, and what they read to the service.

`fxlib.protocol` converts filters and blobs' addresses. What the service keeps in records of its own is converted here:
jobs and events as it stores them, and workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fxlib import protocol
from fxlib.errors import WireError
from fxlib.protocol.converter import Converter, FieldRule
from fxlib.protocol.jobs import FAILURE, STATE
from fxlib.spec.job import JobFilter
from fxlib.v1 import graph_pb2, jobs_pb2
from fxlib_service.blobs.base import CheckedBlob
from fxlib_service.errors import ServiceError, Violation, invalid
from fxlib_service.job import Event, Job
from fxlib_service.stores.base import Worker

_IN_LISTINGS: Final = ("decision", "reason_code", "reason", "qps_original", "qps_optimized", "gain")


def job_message(job: Job, result: bytes | None = None, live: bytes | None = None) -> jobs_pb2.Job:
    """Return the message of a job, with its serialized answer and live figures if they are given."""
    proto = _JOB.write(job)
    if result is not None:
        proto.result.MergeFromString(result)
    if live is not None:
        proto.live.MergeFromString(live)
    return proto


def job_line(job: Job, result: bytes | None, live: bytes | None) -> jobs_pb2.Job:
    """Return the message of a job in a listing, with only the decision, the reason and the figures of its answer."""
    proto = job_message(job, result, live)
    if result is not None:
        proto.result.DiscardUnknownFields()
        for field, _ in proto.result.ListFields():
            if field.name not in _IN_LISTINGS:
                proto.result.ClearField(field.name)
    return proto


def event_message(event: Event) -> jobs_pb2.JobEvent:
    """Return the message of an event of a job's history."""
    return _EVENT.write(event)


def filter_from_proto(proto: jobs_pb2.ListJobsRequest) -> JobFilter:
    """Read the filter of a listing, with each state once.

    Raises:
        ServiceError: INVALID_REQUEST, if a state is unknown.
    """
    try:
        wanted = protocol.filter_from_proto(proto)
    except WireError as error:
        raise invalid("states", str(error)) from None
    return replace(wanted, states=tuple(dict.fromkeys(wanted.states)))


def checked_blob(proto: graph_pb2.BlobRef, field: str = "blob") -> CheckedBlob:
    """Read a reference to a blob.

    Raises:
        ServiceError: INVALID_REQUEST, if it is not valid; names the field within `field`.
    """
    blob = protocol.blob_from_proto(proto)
    try:
        return CheckedBlob(sha256=blob.sha256, size=blob.size)
    except ServiceError as error:
        violations = [Violation(field=f"{field}.{each.field}", problem=each.problem) for each in error.violations]
        raise ServiceError(error.code, violations=violations) from None


def worker_to_proto(worker: Worker) -> jobs_pb2.WorkerInfo:
    """Write a worker."""
    return _WORKER.write(worker)


def worker_from_proto(proto: jobs_pb2.WorkerInfo) -> Worker:
    """Read a worker. `seen_at` is not part of the message."""
    return _WORKER.read(proto)


def _to_timestamp(seconds: float) -> Timestamp:
    """Return a time, given in seconds since the epoch, to the nearest microsecond."""
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


_TIME: Final = FieldRule(_to_timestamp)
# Jobs and events are only written: a client reads them as dataclasses of its own.
_JOB: Final = Converter(
    Job,
    jobs_pb2.Job,
    text=None,
    rules={"state": STATE, "created_at": _TIME, "started_at": _TIME, "finished_at": _TIME, "failure": FAILURE},
    left_out=(
        *("request_digest", "torch_version", "cache_key", "fresh", "token", "hardware", "reusable", "asked_from"),
        *("waits_for", "result", "live"),
    ),
)
_EVENT: Final = Converter(Event, jobs_pb2.JobEvent, text=None, rules={"at": _TIME, "state": STATE})
_WORKER: Final = Converter(
    Worker,
    jobs_pb2.WorkerInfo,
    text=None,
    left_out=("id", "worker_id", "seen_at"),
    write_more=lambda worker: {"worker_id": worker.id},
    read_more=lambda proto: {"id": proto.worker_id},
)
