"""The interface of a job store. Every implementation passes one contract suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fxlib_service.job import Event, Job, State
from fxlib_service.lifecycle import Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs to list: all that match every field that is set; `labels` must all be there."""

    namespace: str = ""
    name: str = ""
    states: tuple[State, ...] = ()
    id_prefix: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The job that a namespace would run next, and how many it runs now. `number` orders jobs by their acceptance."""

    number: int
    job_id: str
    namespace: str
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker as it last described itself; `seen_at` in seconds since the epoch."""

    id: str
    torch_version: str
    hardware: str
    fxlib_version: str = ""
    allowed_modules: tuple[str, ...] = ()
    seen_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The store at a glance. `oldest_queued_at`: when the oldest queued job was accepted, None if there is none."""

    by_state: Mapping[State, int]
    oldest_queued_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Payloads:
    """What a job was asked for with, and its answer, if there is one. `number` orders jobs by their acceptance."""

    number: int
    request: bytes
    result: bytes | None


class QueueFullError(Exception):
    """The namespace has as many queued jobs as it may have."""


class JobStore(ABC):
    """Jobs, their histories and payloads, the workers seen, and which namespace has which blobs.

    What a method stored is durable when it returns, and it stored all of it or nothing. Methods may be called from any
    thread; one process owns a store.
    """

    @abstractmethod
    def submit(self, entry: Transition, request: bytes, *, queue_limit: int) -> Job:
        """Store a new job, or return the one that has its namespace and request id.

        Raises:
            QueueFullError: the job would be queued, and the namespace has `queue_limit` queued jobs.
        """

    @abstractmethod
    def update(self, job_id: str, decide: Callable[[Job], Transition]) -> Transition | None:
        """Read the job, decide, store what follows; None if there is no such job. Nothing comes between."""

    @abstractmethod
    def get(self, job_id: str) -> Job | None:
        """Return a job."""

    @abstractmethod
    def find(self, namespace: str, request_id: str) -> Job | None:
        """Return the job of a request."""

    @abstractmethod
    def request_of(self, job_id: str) -> bytes:
        """Return the request that a job was made for. Raises KeyError if there is no such job."""

    @abstractmethod
    def result_of(self, job_id: str) -> bytes | None:
        """Return the answer, if there is one."""

    @abstractmethod
    def results_of(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        """Return the answers of those jobs that have one, by id."""

    @abstractmethod
    def events(self, job_id: str, *, after: int, limit: int) -> Sequence[Event]:
        """Return the first `limit` lines of a job's history whose sequence is greater than `after`."""

    @abstractmethod
    def page(self, wanted: Filter, *, before: int | None, limit: int) -> tuple[Sequence[Job], int | None]:
        """Return up to `limit` jobs, newest first, that are older than `before`, and the `before` of the next page."""

    @abstractmethod
    def payloads(self, *, after: int, limit: int) -> Sequence[Payloads]:
        """Return those of the first `limit` jobs whose number is greater than `after`."""

    @abstractmethod
    def forget(self, *, finished_before: float, limit: int) -> int:
        """Delete up to `limit` jobs that finished before then, with all that belongs to them; return how many."""

    @abstractmethod
    def heads(self, torch_version: str) -> Sequence[Head]:
        """Return the oldest claimable job of each namespace.

        A queued job is claimable by workers of its torch version, unless an equal one runs: its answer will serve both.
        """

    @abstractmethod
    def running(self) -> Sequence[Job]:
        """Return all running jobs."""

    @abstractmethod
    def duplicates(self, cache_key: str) -> Sequence[Job]:
        """Return the queued jobs with this key that take another job's answer."""

    @abstractmethod
    def answer(self, cache_key: str, hardware: Collection[str]) -> Job | None:
        """Return the newest job with this key that a worker on such hardware gave a reusable answer to."""

    @abstractmethod
    def recent_answers(self, limit: int) -> Sequence[Job]:
        """Return the jobs that workers answered last, the latest first."""

    @abstractmethod
    def see(self, worker: Worker, *, forget_before: float) -> None:
        """Keep a worker's description, in place of its last one; forget those not seen since `forget_before`."""

    @abstractmethod
    def workers(self) -> Sequence[Worker]:
        """Return the workers that are not forgotten, the last seen first."""

    @abstractmethod
    def hold(self, namespace: str, blobs: Mapping[str, int]) -> None:
        """Note that a namespace has blobs, sizes by SHA-256."""

    @abstractmethod
    def held(self, namespace: str, sha256s: Collection[str]) -> set[str]:
        """Return those of some blobs that a namespace has."""

    @abstractmethod
    def held_bytes(self, namespace: str) -> int:
        """Return how large the blobs of a namespace are together."""

    @abstractmethod
    def release(self, sha256: str) -> None:
        """Note that a blob is gone, whoever had it."""

    @abstractmethod
    def stats(self) -> Stats:
        """Count."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""
