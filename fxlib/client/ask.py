"""The conversation with the service about one question, from the first blob to the module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fxlib import protocol, wire
from fxlib.client.blobs import download, upload
from fxlib.client.connection import Connection
from fxlib.client.deadline import Deadline
from fxlib.client.follow import follow, get_job
from fxlib.client.progress import Progress
from fxlib.client.request import Prepared
from fxlib.client.screen import screen
from fxlib.errors import FxlibError, JobFailedError, RejectedError, WireError
from fxlib.jobs import Job
from fxlib.result import Result
from fxlib.v1 import jobs_pb2

BLOB_MISSING = "BLOB_MISSING"
"""The service's code for a blob that it no longer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A result, and what went wrong on the way to it, if anything did."""

    result: Result
    problem: str = ""


def kept(original: nn.Module, error: Exception, *, job_id: str = "") -> Outcome:
    """Keep the original, because of an error."""
    text = str(error) if isinstance(error, FxlibError) else f"unexpected {type(error).__name__}: {error}"
    return Outcome(
        result=Result.original(original, text, job_id=job_id),
        problem=f"training goes on with the original module: {text}",
    )


def ask(
    connection: Connection, prepared: Prepared, deadline: Deadline, patience_s: float, progress: Progress
) -> Outcome:
    """Send the question, follow the job, and bind the answer to the caller's own module; raise nothing."""
    job_id = ""
    try:
        progress.say(f"reaching {connection.address}")
        connection.reach(deadline.within(patience_s))
        job = _accepted(connection, prepared, deadline, progress)
        job_id = job.id
        if not job.done:
            job = follow(connection, job_id, deadline, progress.show)
        elif job.report is None:
            job = get_job(connection, job_id, deadline)
        return Outcome(result=_conclude(connection, prepared, job, deadline))
    except Exception as error:  # noqa: BLE001 - promised: whatever happens on the way, the job trains
        return kept(prepared.captured, error, job_id=job_id)


def _accepted(connection: Connection, prepared: Prepared, deadline: Deadline, progress: Progress) -> Job:
    """Upload what is missing, and hand the question in; the request id makes it safe to repeat."""
    progress.say("sending the graph")
    upload(connection, prepared.blobs, deadline)
    try:
        return _optimize(connection, prepared.request, deadline)
    except RejectedError as error:
        if error.code != BLOB_MISSING:
            raise
        upload(connection, prepared.blobs, deadline)  # swept away between the two calls
        return _optimize(connection, prepared.request, deadline)


def _optimize(connection: Connection, request: jobs_pb2.OptimizeRequest, deadline: Deadline) -> Job:
    answer = connection.call(
        "asking for an optimization", lambda left_s: connection.jobs.Optimize(request, timeout=left_s), deadline
    )
    return protocol.job_from_proto(answer.job)


def _conclude(connection: Connection, prepared: Prepared, job: Job, deadline: Deadline) -> Result:
    if job.report is None:
        detail = f"{job.failure.message} ({job.failure.code})" if job.failure else "no reason given"
        raise JobFailedError(detail, where=f"job {job.id} {job.state}")
    module: nn.Module = prepared.captured
    protocol.check_adoption(job.report, prepared.request.trial.min_gain)
    if job.report.decision == "adopt":
        if job.graph is None:
            raise WireError("there is no graph to adopt", where=f"job {job.id}")
        module = rewritten = wire.decode(wire.parse(download(connection, job.graph, deadline)), root=prepared.captured)
        screen(rewritten, prepared.captured)
    return Result.of(job.report, module=module, job_id=job.id, cached=job.cached)
