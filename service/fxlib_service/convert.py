"""Passes what the service stores to the library's converters, and what they read to the service.

`fxlib.protocol` converts jobs, events, filters and blobs' addresses; the service adds only what its own records need.
Only workers, which no launcher sees as a dataclass, are converted here.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from fxlib import protocol
from fxlib.errors import WireError
from fxlib.protocol.converter import Converter
from fxlib.spec import job as seen
from fxlib.v1 import graph_pb2, jobs_pb2
from fxlib_service.blobs.base import CheckedBlob
from fxlib_service.errors import ServiceError, Violation, invalid
from fxlib_service.job import Event, Job, State
from fxlib_service.stores.base import Filter, Worker

_IN_LISTINGS: Final = ("decision", "reason_code", "reason", "qps_original", "qps_optimized", "gain")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def job_message(job: Job, result: bytes | None = None, live: bytes | None = None) -> jobs_pb2.Job:
    """Return the message of a job, with its serialized answer and live figures if they are given."""
    proto = protocol.job_to_proto(job_as_seen(job))
    if result is not None:
        proto.result.MergeFromString(result)
    if live is not None:
        proto.live.MergeFromString(live)
    return proto


def job_line(job: Job, result: bytes | None, live: bytes | None) -> jobs_pb2.Job:
    """Return the message of a job in a listing, with only the decision, the reason and the figures of its answer."""
    proto = job_message(job, result, live)
    for field, _ in proto.result.ListFields() if result is not None else ():
        if field.name not in _IN_LISTINGS:
            proto.result.ClearField(field.name)
    return proto


def event_message(event: Event) -> jobs_pb2.JobEvent:
    """Return the message of an event of a job's history."""
    return protocol.event_to_proto(event_as_seen(event))


def job_as_seen(job: Job) -> seen.Job:
    """Return a job as its client sees it, without its answer and live figures, which are stored separately."""
    return seen.Job(
        id=job.id,
        request_id=job.request_id,
        name=job.name,
        namespace=job.namespace,
        labels=job.labels,
        where=job.where,
        state=job.state.value,
        phase=job.phase,
        attempts=job.attempts,
        worker_id=job.worker_id,
        created_at=_time(job.created_at),
        started_at=None if job.started_at is None else _time(job.started_at),
        finished_at=None if job.finished_at is None else _time(job.finished_at),
        failure=job.failure,
        cached=job.cached,
        last_sequence=job.last_sequence,
        asked_by=job.asked_by,
        measured_by=job.measured_by,
    )


def event_as_seen(event: Event) -> seen.Event:
    """Return an event as a job's client sees it."""
    return seen.Event(
        sequence=event.sequence,
        at=_time(event.at),
        state=event.state.value,
        phase=event.phase,
        message=event.message,
        progress=event.progress,
    )


def filter_from_proto(proto: jobs_pb2.ListJobsRequest) -> Filter:
    """Read the filter of a listing, with each state once.

    Raises:
        ServiceError: INVALID_REQUEST, if a state is unknown.
    """
    try:
        wanted = protocol.filter_from_proto(proto)
    except WireError as error:
        raise invalid("states", str(error)) from None
    return Filter(
        namespace=wanted.namespace,
        name=wanted.name,
        states=tuple(dict.fromkeys(map(State, wanted.states))),
        id_prefix=wanted.id_prefix,
        labels=wanted.labels,
    )


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


def _time(seconds: float) -> datetime:
    """Return a time, given in seconds since the epoch, to the nearest microsecond."""
    return _EPOCH + timedelta(microseconds=round(seconds * 1e6))


_WORKER: Final = Converter(
    Worker,
    jobs_pb2.WorkerInfo,
    text=None,
    left_out=("id", "worker_id", "seen_at"),
    write_more=lambda worker: {"worker_id": worker.id},
    read_more=lambda proto: {"id": proto.worker_id},
)
