"""Jobs and their events, to and from protobuf."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fxlib.protocol.converter import Bijection, Converter, FieldRule, each_by, finite
from fxlib.protocol.report import GAIN, blob_from_proto, report_from_proto, report_to_proto, variant_graphs_of
from fxlib.spec.job import Event, Job, JobFailure, JobFilter, State
from fxlib.spec.report import LiveFigures
from fxlib.v1 import jobs_pb2
from fxlib.wire.faults import Fault

LEASE: Final = "fxlib-lease"
"""The metadata by which a worker says that an upload belongs to the answer of the job that it holds."""

_STATES = Bijection[State, "jobs_pb2.JobState"](
    {
        "queued": jobs_pb2.JOB_STATE_QUEUED,
        "running": jobs_pb2.JOB_STATE_RUNNING,
        "succeeded": jobs_pb2.JOB_STATE_SUCCEEDED,
        "failed": jobs_pb2.JOB_STATE_FAILED,
        "cancelled": jobs_pb2.JOB_STATE_CANCELLED,
    }
)


def filter_to_proto(wanted: JobFilter) -> jobs_pb2.ListJobsRequest:
    """Write the filter of a listing."""
    return _FILTER.write(wanted)


def filter_from_proto(proto: jobs_pb2.ListJobsRequest) -> JobFilter:
    """Read the filter of a listing.

    Raises:
        WireError: the number of a state has no meaning.
    """
    return _FILTER.read_at("ListJobsRequest", proto)


def job_to_proto(job: Job) -> jobs_pb2.Job:
    """Write a job."""
    return _JOB.write(job)


def job_from_proto(proto: jobs_pb2.Job) -> Job:
    """Read a job; text in it becomes plain.

    Raises:
        WireError: a field of the job or of its result has no meaning.
    """
    return _JOB.read_at("Job", proto)


def event_to_proto(event: Event) -> jobs_pb2.JobEvent:
    """Write one line of a job's history."""
    return _EVENT.write(event)


def event_from_proto(proto: jobs_pb2.JobEvent) -> Event:
    """Read one line of a job's history; text in it becomes plain.

    Raises:
        WireError: the time or the state has no meaning, or the progress is not a figure.
    """
    return _EVENT.read_at("JobEvent", proto)


def live_to_proto(live: LiveFigures) -> jobs_pb2.LiveFigures:
    """Write the figures that a launcher measures in its own steps."""
    return _LIVE.write(live)


def _to_timestamp(at: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(at)
    return stamp


def _from_timestamp(stamp: Timestamp) -> datetime:
    try:
        return stamp.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise Fault(f"{stamp.seconds} s and {stamp.nanos} ns are not a time") from None


def _result_of(job: Job) -> dict[str, jobs_pb2.JobResult]:
    if job.report is None:
        return {}
    return {"result": report_to_proto(job.report, graph=job.graph, variant_graphs=job.variant_graphs)}


def _answer_of(proto: jobs_pb2.Job) -> dict[str, object]:
    if not proto.HasField("result"):
        return {}
    return {
        "report": report_from_proto(proto.result),
        "graph": blob_from_proto(proto.result.graph) if proto.result.HasField("graph") else None,
        "variant_graphs": variant_graphs_of(proto.result),
    }


_TIME = FieldRule(_to_timestamp, _from_timestamp)
_LIVE = Converter(LiveFigures, jobs_pb2.LiveFigures, rules={"at": _TIME, "gain": GAIN})
STATE: Final = _STATES.rule
"""The rule of a field that holds the state of a job."""
FAILURE: Final = Converter(JobFailure, jobs_pb2.JobFailure).one
"""The rule of a field that says why a job failed."""
_JOB = Converter(
    Job,
    jobs_pb2.Job,
    rules={
        "state": STATE,
        "created_at": _TIME,
        "started_at": _TIME,
        "finished_at": _TIME,
        "failure": FAILURE,
        "live": _LIVE.one,
    },
    left_out=("result", "report", "graph", "variant_graphs"),
    write_more=_result_of,
    read_more=_answer_of,
)
_EVENT = Converter(
    Event,
    jobs_pb2.JobEvent,
    rules={
        "at": _TIME,
        "state": STATE,
        "progress": FieldRule(read=lambda progress: None if progress < 0 else finite(progress), unknown=-1.0),
    },
)
_FILTER = Converter(
    JobFilter,
    jobs_pb2.ListJobsRequest,
    text=None,
    rules={"states": FieldRule(each_by(_STATES.there), each_by(_STATES.back))},
    left_out=("page_size", "page_token", "oldest_first"),
)
