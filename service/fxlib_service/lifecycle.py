"""The state machine of a job, as pure functions from an occurrence to the job's next state and an event.

    submit --> QUEUED --Claimed--> RUNNING --Completed--> SUCCEEDED
                 | ^                 | | |----Failed----> FAILED
                 | +-----Released----+ |                    ^
                 | +---LeaseExpired----+--(last attempt)----+
                 +--Answered--> SUCCEEDED or FAILED     Cancelled: QUEUED or RUNNING --> CANCELLED

A finished job keeps its outcome; its launcher's reports about training are added. A call under the lease that the job
ended with is ignored, so that a worker may repeat its last call. An outcome that differs from the job's is refused, and
so is any call under another lease.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from fxlib.spec.job import JobFailure
from fxlib_service.errors import Code, ServiceError, invalid
from fxlib_service.job import Event, Job, State

MAX_ATTEMPTS: Final = 3
WENT_BACK: Final = "went_back"
"""The phase of an answered job whose launcher went back to its original."""
MAX_EVENTS: Final = 2_000
"""Number of events of a job after which a worker's reports are dropped; changes of state are still recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A worker claims the job; `principal` is the worker's authenticated name."""

    worker_id: str
    token: str
    hardware: str
    principal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """The worker reports progress: `progress` is the share of the phase that is done, negative when unknown."""

    token: str
    phase: str
    message: str = ""
    progress: float = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The worker has the answer; `reusable` says whether equal jobs may get it, too."""

    token: str
    result: bytes
    message: str
    reusable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The worker could not find an answer."""

    token: str
    failure: JobFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The worker returns the job unfinished."""

    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired:
    """The worker was silent for the length of a lease."""

    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An equal job has ended, and this one ends in the same way, with its answer or its failure."""

    job_id: str
    result: bytes | None = None
    failure: JobFailure | None = None
    measured_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The user cancels the job."""


Input = Claimed | Reported | Completed | Failed | Released | LeaseExpired | Answered | Cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The job after a decision, with the data to store: an event, the answer, and the launcher's live figures.

    `event` is None if the job itself did not change. `claimed` says that a worker has just got the job.
    """

    job: Job
    event: Event | None = None
    result: bytes | None = None
    live: bytes | None = None
    claimed: bool = False

    @property
    def at_once(self) -> bool:
        """Whether the job ended on arrival, so that nobody can have waited for it or watched it."""
        return self.event is not None and self.event.sequence == 1 and self.job.state.finished

    def ends_equal_jobs(self, before: Job) -> bool:
        """Return whether a worker has just ended the job, as it was `before`, and so all that are equal and queued."""
        job = self.job
        return not before.state.finished and job.state in (State.SUCCEEDED, State.FAILED) and not job.cached


def submit(job: Job, *, message: str = "queued") -> Transition:
    """Enter a new job into the queue."""
    return _next(job, job.created_at, message)


def decide(job: Job, happened: Input, now: float) -> Transition:
    """Return the transition of a job after an occurrence at `now`, in seconds since the epoch.

    Raises:
        ServiceError: LEASE_LOST if a worker's call came under a lease that is not the job's.
    """
    match happened:
        case Claimed():
            return _claim(job, happened, now)
        case Answered():
            return _answer(job, happened, now)
        case Cancelled():
            return _cancel(job, now)
        case LeaseExpired():
            return _expire(job, happened, now)
        case Reported() | Completed() | Failed() | Released():
            return _under_lease(job, happened, now)


def observe(job: Job, live: bytes, now: float, *, went_back: str = "") -> Transition:
    """Return the transition of a job after its launcher's report about training, `live`.

    Args:
        job: the job whose answer the launcher trains with.
        live: the figures, serialized.
        now: seconds since the epoch.
        went_back: why the launcher went back to its original, reported once; empty if it did not.

    Raises:
        ServiceError: INVALID_REQUEST if the job has no answer.
    """
    if job.state is not State.SUCCEEDED:
        raise invalid("job_id", f"job {job.id} is {job.state.value}: it has no answer to train with")
    if not went_back or job.phase == WENT_BACK:
        return Transition(job=job, live=live)
    return replace(_next(replace(job, phase=WENT_BACK), now, went_back), live=live)


def _claim(job: Job, claim: Claimed, now: float) -> Transition:
    if job.state is not State.QUEUED:
        return Transition(job=job)
    attempts = job.attempts + 1
    running = replace(
        job,
        state=State.RUNNING,
        phase="rewrite",
        attempts=attempts,
        worker_id=claim.worker_id,
        token=claim.token,
        hardware=claim.hardware,
        measured_by=claim.principal,
        started_at=now,
    )
    message = f"claimed by worker {claim.worker_id} (attempt {attempts} of {MAX_ATTEMPTS})"
    return replace(_next(running, now, message), claimed=True)


def _answer(job: Job, answer: Answered, now: float) -> Transition:
    if job.state is not State.QUEUED or job.fresh:
        return Transition(job=job)
    if answer.failure is not None:
        return _fail(replace(job, cached=True, measured_by=answer.measured_by), answer.failure, now)
    done = replace(
        job,
        state=State.SUCCEEDED,
        phase="done",
        started_at=job.started_at if job.last_sequence else now,  # one without a history never waited
        finished_at=now,
        cached=True,
        measured_by=answer.measured_by,
        last_sequence=job.last_sequence + 1,
    )
    return _moved(done, now, f"answered with the result of job {answer.job_id}, which was equal", result=answer.result)


def _cancel(job: Job, now: float) -> Transition:
    if job.state.finished:
        return Transition(job=job)
    return _next(replace(job, state=State.CANCELLED, phase="done", finished_at=now), now, "cancelled")


def _expire(job: Job, expired: LeaseExpired, now: float) -> Transition:
    if job.state is not State.RUNNING or job.token != expired.token:
        return Transition(job=job)
    lost = f"worker {job.worker_id} was lost (attempt {job.attempts} of {MAX_ATTEMPTS})"
    return _requeue_or_fail(
        job, now, lost, "the job may have crashed its workers, or they lost contact with the service"
    )


def _release(job: Job, now: float) -> Transition:
    """Put a job that its worker returns back into the queue, which does not count as an attempt.

    When its history is full, it does count, so that workers that take and return jobs endlessly cannot fill a disk.
    """
    given_back = f"given back by worker {job.worker_id}"
    if job.last_sequence < MAX_EVENTS:
        return _requeue(replace(job, attempts=job.attempts - 1), now, given_back)
    return _requeue_or_fail(job, now, given_back, "its workers give it back without end")


def _requeue_or_fail(job: Job, now: float, happened: str, why: str) -> Transition:
    if job.attempts < MAX_ATTEMPTS:
        return _requeue(job, now, f"{happened}; queued again")
    return _fail(job, JobFailure(code=Code.WORKER_LOST.name, message=f"{happened}: {why}"), now)


def _under_lease(job: Job, happened: Reported | Completed | Failed | Released, now: float) -> Transition:
    if not job.token or job.token != happened.token:
        raise ServiceError(Code.LEASE_LOST, f"job {job.id} is not leased under this token")
    if job.state.finished:
        _check_same(job, happened)
        return Transition(job=job)
    match happened:
        case Reported():
            return _report(job, happened, now)
        case Completed():
            done = replace(job, state=State.SUCCEEDED, phase="done", finished_at=now, reusable=happened.reusable)
            return _next(done, now, happened.message, result=happened.result)
        case Failed():
            return _fail(job, happened.failure, now)
        case Released():
            return _release(job, now)


def _check_same(job: Job, happened: Reported | Completed | Failed | Released) -> None:
    """Refuse an outcome that differs from the one that the job ended with. The dispatcher compares answers."""
    failed, completed = isinstance(happened, Failed), isinstance(happened, Completed)
    other = (failed and job.state is State.SUCCEEDED) or (completed and job.state is State.FAILED)
    if other or (isinstance(happened, Failed) and job.state is State.FAILED and job.failure != happened.failure):
        raise ServiceError(Code.LEASE_LOST, f"job {job.id} has ended with another outcome: {job.state.value}")


def _report(job: Job, report: Reported, now: float) -> Transition:
    if job.last_sequence >= MAX_EVENTS:
        return Transition(job=job)
    return _next(replace(job, phase=report.phase), now, report.message, progress=report.progress)


def _requeue(job: Job, now: float, message: str) -> Transition:
    return _next(
        replace(job, state=State.QUEUED, phase="queued", worker_id="", token="", hardware="", measured_by=""),
        now,
        message,
    )


def _fail(job: Job, failure: JobFailure, now: float) -> Transition:
    failed = replace(job, state=State.FAILED, phase="done", finished_at=now, failure=failure)
    return _next(failed, now, f"{failure.code}: {failure.message}")


def _next(job: Job, now: float, message: str, *, progress: float = -1.0, result: bytes | None = None) -> Transition:
    return _moved(replace(job, last_sequence=job.last_sequence + 1), now, message, progress=progress, result=result)


def _moved(job: Job, now: float, message: str, *, progress: float = -1.0, result: bytes | None = None) -> Transition:
    """Return the transition to a job's new state, with the event that its last sequence number already counts."""
    event = Event(
        sequence=job.last_sequence, at=now, state=job.state, phase=job.phase, message=message, progress=progress
    )
    return Transition(job=job, event=event, result=result)
