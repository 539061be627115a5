"""Follow a job until it is done, across interruptions of the connection, and show its progress.

Progress is a moving line on a terminal, and plain lines elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol, Self, TextIO

import grpc

from fxlib.client.connection import Connection, Deadline
from fxlib.errors import ServiceUnavailableError
from fxlib.protocol import event_from_proto, job_from_proto
from fxlib.spec.job import TERMINAL, Event, Job
from fxlib.utils.text import plain
from fxlib.v1 import jobs_pb2

_LOG = logging.getLogger(__name__)

STREAM_S = 30.0
"""Time in seconds after which a stream is opened anew, so that a connection that died silently is noticed."""

_PAUSE_S = 0.2
"""Pause in seconds between two streams, for a service that ends them at once."""


def follow(
    connection: Connection, job_id: str, deadline: Deadline, listener: Callable[[Event], None], *, after: int = 0
) -> Job:
    """Tell the listener every event after sequence `after`, once and in order, and return the finished job.

    Raises:
        ServiceUnavailableError: the deadline passed, or the service was away for too long.
        RejectedError: the service does not know the job.
        KeyboardInterrupt: the user interrupts; a note says what becomes of the job.
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
        RejectedError: the service does not know the job.
        WireError: the answer has no meaning.
    """
    request = jobs_pb2.GetJobRequest(job_id=job_id)
    answer = connection.call(
        "asking for the job", lambda left_s: connection.jobs.GetJob(request, timeout=left_s), deadline
    )
    return job_from_proto(answer.job)


class _Stream:
    """A sequence of WatchJob streams, each from where the last one ended; calling it returns whether the job is done.

    `said` is the message of the last event.
    """

    def __init__(self, connection: Connection, job_id: str, listener: Callable[[Event], None], after: int) -> None:
        self._stub, self._job_id, self._listener, self._last = connection.jobs, job_id, listener, after
        self.said = ""

    def __call__(self, left_s: float) -> bool:
        before, done = self._last, False
        request = jobs_pb2.WatchJobRequest(job_id=self._job_id, after_sequence=before)
        try:
            for answer in self._stub.WatchJob(request, timeout=min(STREAM_S, left_s)):
                event = event_from_proto(answer.event)
                if event.sequence <= self._last:
                    continue
                self._last, self.said = event.sequence, event.message
                _LOG.debug("job %s: %s", self._job_id, event)
                self._listener(event)
                done = event.state in TERMINAL  # a launcher's reports after the end follow, and then the stream ends
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        else:
            if self._last == before:  # a job that is done has nothing to tell those who heard it all
                asked = jobs_pb2.GetJobRequest(job_id=self._job_id)
                done = job_from_proto(self._stub.GetJob(asked, timeout=left_s).job).done
        return done


class Progress(Protocol):
    """Shows the progress of a job while a launcher waits for it."""

    def say(self, text: str) -> None:
        """Show an action of the client itself."""

    def show(self, event: Event) -> None:
        """Show an event that the service reports."""


class Silent:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def show(self, event: Event) -> None:
        """Show nothing."""


class Lines:
    """Writes a plain line for each new phase, and one from time to time within a phase, for logs."""

    def __init__(self, stream: TextIO, *, every_s: float = 10.0) -> None:
        self._stream, self._every_s = stream, every_s
        self._last, self._phase, self._next_s = "", "", 0.0

    def say(self, text: str) -> None:
        """Write a line, unless it repeats the last one."""
        text = plain(text)
        if text != self._last:
            self._last = text
            # A log that is closed or full must not stop training.
            with contextlib.suppress(OSError, ValueError):
                print(f"fxlib: {text}", file=self._stream, flush=True)

    def show(self, event: Event) -> None:
        """Write phase and message, unless the same phase had a line recently."""
        now_s = time.monotonic()
        if event.phase != self._phase or event.state in TERMINAL or now_s >= self._next_s:
            self._phase, self._next_s = event.phase, now_s + self._every_s
            self.say(sentence(event))


class _Terminal:
    """Shows a spinner, a bar for the current phase, and the elapsed time; they vanish when the job is done."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("fxlib: {task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._bars.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Show a sentence without a bar."""
        self._bars.update(self._task, description=plain(text), total=None)

    def show(self, event: Event) -> None:
        """Show phase, message and bar."""
        known, text = event.progress is not None, plain(sentence(event))
        self._bars.update(self._task, description=text, total=1.0 if known else None, completed=event.progress or 0.0)


def sentence(event: Event) -> str:
    """Write phase (or state) and message as one line."""
    phase = event.phase or event.state
    return f"{phase}: {event.message}" if event.message and event.message != phase else phase


@contextlib.contextmanager
def display(stream: TextIO | None = None) -> Iterator[Progress]:
    """Show progress on `stream` (standard error by default) in the way that suits it."""
    stream = sys.stderr if stream is None else stream
    if stream is None or not stream.isatty():
        yield Lines(stream) if stream is not None else Silent()
        return
    with _Terminal(stream) as terminal:
        yield terminal
