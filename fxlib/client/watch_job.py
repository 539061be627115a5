"""Follow a job until it is done, across interruptions of the connection."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import grpc

from fxlib.client.connection import Connection
from fxlib.client.deadline import Deadline
from fxlib.errors import ServiceUnavailableError
from fxlib.protocol import event_from_proto, job_from_proto
from fxlib.spec.job import TERMINAL, Event, Job
from fxlib.v1 import jobs_pb2

_LOG = logging.getLogger(__name__)

STREAM_S = 30.0
"""Seconds after which a stream is opened anew, so that a connection that died silently is noticed."""

_PAUSE_S = 0.2
"""Seconds between two streams, for a service that ends them at once."""


def follow(
    connection: Connection, job_id: str, deadline: Deadline, listener: Callable[[Event], None], *, after: int = 0
) -> Job:
    """Tell the listener every event after sequence `after`, once and in order, and return the finished job.

    Raises:
        ServiceUnavailableError: the deadline passed, or the service was away for too long.
        RejectedError: the service does not know the job.
        KeyboardInterrupt: with a note that says what becomes of the job.
    """
    stream = _Stream(connection, job_id, listener, after)
    goes_on = f"It goes on, and its answer will be reused: fxlib jobs watch {job_id}"
    try:
        while not connection.call("following the job", stream, deadline):
            time.sleep(min(_PAUSE_S, deadline.left_s))
            if deadline.passed:
                said = f"; last it said: {stream.said}" if stream.said else ""
                raise ServiceUnavailableError(
                    f"job {job_id} is not done within {deadline.seconds:.3g} s{said}", hint=goes_on
                )
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"job {job_id} is not done. {goes_on}. To end it: fxlib jobs cancel {job_id}")
        raise
    return get_job(connection, job_id, deadline)


def get_job(connection: Connection, job_id: str, deadline: Deadline) -> Job:
    """Ask for one job.

    Raises:
        ServiceUnavailableError: the service was not reached in time.
        RejectedError: it does not know the job.
        WireError: the answer has no meaning.
    """
    request = jobs_pb2.GetJobRequest(job_id=job_id)
    answer = connection.call(
        "asking for the job", lambda left_s: connection.jobs.GetJob(request, timeout=left_s), deadline
    )
    return job_from_proto(answer.job)


class _Stream:
    """One WatchJob stream after the other, each from where the last one ended; returns whether the job is done.

    `said` is the message of the last event.
    """

    def __init__(self, connection: Connection, job_id: str, listener: Callable[[Event], None], after: int) -> None:
        self._stub, self._job_id, self._listener, self._last = connection.jobs, job_id, listener, after
        self.said = ""

    def __call__(self, left_s: float) -> bool:
        request, done = jobs_pb2.WatchJobRequest(job_id=self._job_id, after_sequence=self._last), False
        try:
            for answer in self._stub.WatchJob(request, timeout=min(STREAM_S, left_s)):
                event = event_from_proto(answer.event)
                if event.sequence <= self._last:
                    continue
                self._last, self.said = event.sequence, event.message
                _LOG.debug("job %s: %s", self._job_id, event)
                self._listener(event)
                done = event.state in TERMINAL  # what a launcher told after the end follows, and then the stream ends
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return done
