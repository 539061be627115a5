"""Jobs and their events, to and from protobuf."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from fxlib.errors import WireError
from fxlib.protocol.bijection import Bijection
from fxlib.protocol.plain import finite, plain
from fxlib.protocol.report import blob_from_proto, report_from_proto, report_to_proto, variant_graphs_of
from fxlib.spec.job import Event, Failure, Job, State
from fxlib.v1 import jobs_pb2

_STATES = Bijection[State, "jobs_pb2.JobState"](
    {
        "queued": jobs_pb2.JOB_STATE_QUEUED,
        "running": jobs_pb2.JOB_STATE_RUNNING,
        "succeeded": jobs_pb2.JOB_STATE_SUCCEEDED,
        "failed": jobs_pb2.JOB_STATE_FAILED,
        "cancelled": jobs_pb2.JOB_STATE_CANCELLED,
    }
)


def state_to_proto(state: State) -> jobs_pb2.JobState:
    """Write a job's state."""
    return _STATES.there(state)


def state_from_proto(proto: jobs_pb2.JobState) -> State:
    """Read a job's state.

    Raises:
        WireError: it has no meaning.
    """
    return _STATES.back(proto, "Job.state")


def job_to_proto(job: Job) -> jobs_pb2.Job:
    """Write a job."""
    proto = jobs_pb2.Job(
        id=job.id,
        request_id=job.request_id,
        name=job.name,
        namespace=job.namespace,
        labels=job.labels,
        state=state_to_proto(job.state),
        phase=job.phase,
        attempts=job.attempts,
        worker_id=job.worker_id,
        cached=job.cached,
        last_sequence=job.last_sequence,
    )
    for name in ("created_at", "started_at", "finished_at"):
        if (at := getattr(job, name)) is not None:
            getattr(proto, name).CopyFrom(_to_timestamp(at))
    if job.report is not None:
        proto.result.CopyFrom(report_to_proto(job.report, graph=job.graph, variant_graphs=job.variant_graphs))
    if job.failure is not None:
        proto.failure.CopyFrom(jobs_pb2.JobFailure(code=job.failure.code, message=job.failure.message))
    return proto


def job_from_proto(proto: jobs_pb2.Job) -> Job:
    """Read a job; text in it becomes plain.

    Raises:
        WireError: a field of the job or of its result has no meaning.
    """
    has_graph = proto.HasField("result") and proto.result.HasField("graph")
    return Job(
        id=plain(proto.id),
        request_id=plain(proto.request_id),
        name=plain(proto.name),
        namespace=plain(proto.namespace),
        labels={plain(key): plain(value) for key, value in proto.labels.items()},
        state=state_from_proto(proto.state),
        phase=plain(proto.phase),
        attempts=proto.attempts,
        worker_id=plain(proto.worker_id),
        created_at=_from_timestamp(proto.created_at, "Job.created_at") if proto.HasField("created_at") else None,
        started_at=_from_timestamp(proto.started_at, "Job.started_at") if proto.HasField("started_at") else None,
        finished_at=_from_timestamp(proto.finished_at, "Job.finished_at") if proto.HasField("finished_at") else None,
        report=report_from_proto(proto.result) if proto.HasField("result") else None,
        graph=blob_from_proto(proto.result.graph) if has_graph else None,
        variant_graphs=variant_graphs_of(proto.result) if proto.HasField("result") else {},
        failure=_failure(proto.failure) if proto.HasField("failure") else None,
        cached=proto.cached,
        last_sequence=proto.last_sequence,
    )


def event_to_proto(event: Event) -> jobs_pb2.JobEvent:
    """Write one line of a job's history."""
    return jobs_pb2.JobEvent(
        sequence=event.sequence,
        at=_to_timestamp(event.at),
        state=state_to_proto(event.state),
        phase=event.phase,
        message=event.message,
        progress=-1.0 if event.progress is None else event.progress,
    )


def event_from_proto(proto: jobs_pb2.JobEvent) -> Event:
    """Read one line of a job's history; text in it becomes plain.

    Raises:
        WireError: the time or the state has no meaning, or the progress is no figure.
    """
    return Event(
        sequence=proto.sequence,
        at=_from_timestamp(proto.at, "JobEvent.at"),
        state=_STATES.back(proto.state, "JobEvent.state"),
        phase=plain(proto.phase),
        message=plain(proto.message),
        progress=None if proto.progress < 0 else finite(proto.progress, "JobEvent.progress"),
    )


def _failure(proto: jobs_pb2.JobFailure) -> Failure:
    return Failure(code=plain(proto.code), message=plain(proto.message))


def _to_timestamp(at: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(at)
    return stamp


def _from_timestamp(stamp: Timestamp, where: str) -> datetime:
    try:
        return stamp.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise WireError(f"{stamp.seconds} s and {stamp.nanos} ns are no time", where=where) from None
