"""The interface of a job store. Every implementation passes one contract suite."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fxlib.spec.job import JobFilter
from fxlib_service.job import Event, Job, State
from fxlib_service.lifecycle import Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The next job of a namespace that may run `where`; `number` orders jobs by acceptance.

    `running` counts the running jobs of the namespace. A worker last claimed one of its jobs at `served_at`, in seconds
    since the epoch.
    """

    number: int
    job_id: str
    namespace: str
    running: int
    served_at: float = 0.0
    where: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The number of queued jobs of one torch version that have the same requirements on where they run."""

    torch_version: str
    where: Mapping[str, str]
    jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker as it last described itself. `seen_at` is when it was last seen, in seconds since the epoch."""

    id: str
    torch_version: str
    hardware: str
    fxlib_version: str = ""
    allowed_modules: tuple[str, ...] = ()
    containment: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    seen_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The number of jobs by state, and when the oldest queued one was accepted, in seconds since the epoch."""

    by_state: Mapping[State, int]
    oldest_queued_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Payloads:
    """The serialized request of a job, and its answer if there is one. `number` orders jobs by acceptance."""

    number: int
    request: bytes
    result: bytes | None


class QueueFullError(Exception):
    """A namespace has reached its limit of queued jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """The data to store for a new job: the transition decided for it, and its serialized request.

    A job to be queued is not stored while its namespace has `queue_limit` queued jobs.
    """

    transition: Transition
    request: bytes
    queue_limit: int


class JobStore(ABC):
    """Stores jobs, their histories and payloads, the known workers, and which namespace has which blobs.

    Each method is one transaction, whose writes are durable when it returns. Methods may be called from any thread. One
    process owns a store, unless the store says that several may share it.
    """

    def submit(self, entry: Transition, request: bytes, *, queue_limit: int) -> Job:
        """Store a new job, or return the existing one with its namespace and request id.

        Raises:
            QueueFullError: the job would be queued, and the namespace has `queue_limit` queued jobs.
        """
        (job,) = self.enter([NewJob(transition=entry, request=request, queue_limit=queue_limit)])
        if job is None:
            raise QueueFullError
        return job

    @abstractmethod
    def enter(self, new: Sequence[NewJob]) -> Sequence[Job | None]:
        """Store new jobs in one transaction, and return what `submit` would return for each.

        None stands for a QueueFullError, which concerns only that job.
        """

    @abstractmethod
    def update(self, job_id: str, decide: Callable[[Job], Transition]) -> Transition | None:
        """Read the job, decide, and store the result, all without interruption; return None if there is no such job."""

    @abstractmethod
    def claim(self, job_id: str, decide: Callable[[Job], Transition], *, lease_s: float) -> Transition | None:
        """Do the same as `update`, with a lease of so many seconds; None if the job cannot be claimed (any more)."""

    @abstractmethod
    def get(self, job_id: str) -> Job | None:
        """Return a job."""

    @abstractmethod
    def find(self, namespace: str, request_id: str) -> Job | None:
        """Return the job of a request id."""

    @abstractmethod
    def request_of(self, job_id: str) -> bytes:
        """Return the request that a job was made for. Raises KeyError if there is no such job."""

    @abstractmethod
    def result_of(self, job_id: str) -> bytes | None:
        """Return the answer, if there is one."""

    @abstractmethod
    def results_of(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        """Return the answers of those of the jobs that have one, by id."""

    @abstractmethod
    def live_of(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        """Return the last live figures from launchers for those of the jobs that have any, by id."""

    @abstractmethod
    def events(self, job_id: str, *, after: int, limit: int) -> Sequence[Event]:
        """Return the first `limit` events of a job's history with a sequence number above `after`."""

    @abstractmethod
    def page(
        self, wanted: JobFilter, *, beyond: int | None, limit: int, oldest_first: bool = False
    ) -> tuple[Sequence[Job], int | None]:
        """Return up to `limit` jobs, newest first by default, and the `beyond` of the next page."""

    @abstractmethod
    def payloads(self, *, after: int, limit: int) -> Sequence[Payloads]:
        """Return the payloads of the first `limit` jobs whose number is greater than `after`."""

    @abstractmethod
    def forget(self, *, finished_before: float, limit: int) -> int:
        """Delete up to `limit` jobs that finished before a time, with all their data; return their number."""

    @abstractmethod
    def heads(self, torch_version: str, *, now: float = math.inf) -> Sequence[Head]:
        """Return the oldest claimable job of each namespace, for each place where its jobs may run.

        A claim with a time after `now` was made before the clock was set back; it does not count for `served_at`.

        A queued job can be claimed by workers of its torch version, unless an equal one runs, whose answer serves both.
        """

    @abstractmethod
    def waiting(self) -> Sequence[Waiting]:
        """Count the queued jobs by their requirements on a worker."""

    @abstractmethod
    def running(self) -> Sequence[Job]:
        """Return all running jobs."""

    @abstractmethod
    def duplicates(self, cache_key: str) -> Sequence[Job]:
        """Return the queued jobs with this key, except those that ask for a fresh answer."""

    @abstractmethod
    def ended_equal(self, job_id: str) -> Job | None:
        """Return the job with the same key that a worker ended last while this one was queued; None for a fresh one."""

    @abstractmethod
    def answer(self, cache_key: str, hardware: Collection[str]) -> Job | None:
        """Return the last accepted job with this key and a reusable answer measured on one of these hardwares."""

    @abstractmethod
    def recent_answers(self, limit: int) -> Sequence[Job]:
        """Return up to `limit` jobs that workers answered, those accepted last first."""

    @abstractmethod
    def see(self, worker: Worker, *, forget_before: float, gone: Collection[str] = ()) -> None:
        """Store a worker's description in place of its last one.

        Workers not seen since `forget_before`, and those with the ids in `gone`, are deleted.
        """

    @abstractmethod
    def workers(self) -> Sequence[Worker]:
        """Return the stored workers, last seen first."""

    @abstractmethod
    def hold(self, namespace: str, blobs: Mapping[str, int]) -> None:
        """Record that a namespace has blobs, given as sizes in bytes by SHA-256."""

    @abstractmethod
    def held(self, namespace: str, sha256s: Collection[str]) -> set[str]:
        """Return which of some blobs a namespace has."""

    @abstractmethod
    def held_bytes(self, namespace: str, *, besides: Collection[str] = ()) -> int:
        """Return the total size in bytes of a namespace's blobs, besides those with the given SHA-256s."""

    @abstractmethod
    def release(self, sha256: str) -> None:
        """Record that a blob was deleted, for all namespaces that had it."""

    @abstractmethod
    def ping(self) -> None:
        """Raise STORAGE_UNAVAILABLE if the store cannot be read now."""

    @abstractmethod
    def stats(self) -> Stats:
        """Count the jobs by state."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""
