"""Jobs, events and workers, between the service's own form and the protocol's."""

from __future__ import annotations

from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fxlib.v1 import graph_pb2, jobs_pb2
from fxlib_service.blobs.base import Blob
from fxlib_service.errors import ServiceError, Violation, invalid
from fxlib_service.job import Event, Job, State
from fxlib_service.stores.base import Filter, Worker

STATES: Final = {
    State.QUEUED: jobs_pb2.JOB_STATE_QUEUED,
    State.RUNNING: jobs_pb2.JOB_STATE_RUNNING,
    State.SUCCEEDED: jobs_pb2.JOB_STATE_SUCCEEDED,
    State.FAILED: jobs_pb2.JOB_STATE_FAILED,
    State.CANCELLED: jobs_pb2.JOB_STATE_CANCELLED,
}
_IN_LISTINGS: Final = ("decision", "reason_code", "reason", "qps_original", "qps_optimized", "gain")
_WORDS: Final = {number: state for state, number in STATES.items()}


def job_to_proto(job: Job, result: bytes | None = None) -> jobs_pb2.Job:
    """Write a job, with its answer if that is given."""
    proto = jobs_pb2.Job(
        id=job.id,
        request_id=job.request_id,
        name=job.name,
        namespace=job.namespace,
        labels=job.labels,
        state=STATES[job.state],
        phase=job.phase,
        attempts=job.attempts,
        worker_id=job.worker_id,
        created_at=_timestamp(job.created_at),
        cached=job.cached,
        last_sequence=job.last_sequence,
    )
    if job.started_at is not None:
        proto.started_at.CopyFrom(_timestamp(job.started_at))
    if job.finished_at is not None:
        proto.finished_at.CopyFrom(_timestamp(job.finished_at))
    if job.failure is not None:
        proto.failure.CopyFrom(jobs_pb2.JobFailure(code=job.failure.code, message=job.failure.message))
    if result is not None:
        proto.result.MergeFromString(result)
    return proto


def job_to_line(job: Job, result: bytes | None) -> jobs_pb2.Job:
    """Write a job as a listing shows it: of its answer, what was decided, why, and the figures."""
    proto = job_to_proto(job, result)
    for field, _ in proto.result.ListFields() if result is not None else ():
        if field.name not in _IN_LISTINGS:
            proto.result.ClearField(field.name)
    return proto


def event_to_proto(event: Event) -> jobs_pb2.JobEvent:
    """Write a line of a job's history."""
    return jobs_pb2.JobEvent(
        sequence=event.sequence,
        at=_timestamp(event.at),
        state=STATES[event.state],
        phase=event.phase,
        message=event.message,
        progress=event.progress,
    )


def worker_to_proto(worker: Worker) -> jobs_pb2.WorkerInfo:
    """Write a worker."""
    return jobs_pb2.WorkerInfo(
        worker_id=worker.id,
        torch_version=worker.torch_version,
        hardware=worker.hardware,
        allowed_modules=worker.allowed_modules,
        fxlib_version=worker.fxlib_version,
    )


def worker_from_proto(proto: jobs_pb2.WorkerInfo) -> Worker:
    """Read a worker. When it was seen is not part of the message."""
    return Worker(
        id=proto.worker_id,
        torch_version=proto.torch_version,
        hardware=proto.hardware,
        allowed_modules=tuple(proto.allowed_modules),
        fxlib_version=proto.fxlib_version,
    )


def filter_from_proto(proto: jobs_pb2.ListJobsRequest) -> Filter:
    """Read which jobs are wanted.

    Raises:
        ServiceError: INVALID_REQUEST, if a state is unknown.
    """
    unknown = [number for number in proto.states if number not in _WORDS]
    if unknown:
        raise invalid("states", f"{unknown[0]} is no state")
    return Filter(
        namespace=proto.namespace,
        name=proto.name,
        states=tuple(dict.fromkeys(_WORDS[number] for number in proto.states)),
        id_prefix=proto.id_prefix,
        labels=dict(proto.labels),
    )


def blob_from_proto(proto: graph_pb2.BlobRef, field: str = "blob") -> Blob:
    """Read a blob's name.

    Raises:
        ServiceError: INVALID_REQUEST, if it is none; names the field within `field`.
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
