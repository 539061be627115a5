"""Jobs in this process's memory, for tests: the contract suite runs over them as over the real stores."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from fxlib.spec.job import JobFilter
from fxlib_service.job import Event, Job, State
from fxlib_service.lifecycle import Transition
from fxlib_service.stores.base import Head, JobStore, NewJob, Payloads, Stats, Waiting, Worker


@dataclass(slots=True, kw_only=True)
class _Entry:
    number: int
    job: Job
    request: bytes
    events: list[Event] = field(default_factory=list)
    result: bytes | None = None
    live: bytes | None = None
    ended_equal: str = ""


class MemoryJobStore(JobStore):
    """All in dictionaries, under one lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._requests: dict[tuple[str, str], str] = {}
        self._workers: dict[str, Worker] = {}
        self._holdings: dict[str, dict[str, int]] = {}
        self._numbers = itertools.count(1)

    @override
    def enter(self, new: Sequence[NewJob]) -> Sequence[Job | None]:
        with self._lock:
            return [self._enter(each) for each in new]

    def _enter(self, new: NewJob) -> Job | None:
        entry, job = new.transition, new.transition.job
        known = self.find(job.namespace, job.request_id)
        if known is not None:
            return known
        queued = sum(other.namespace == job.namespace for other in self._in(State.QUEUED))
        if job.state is State.QUEUED and queued >= new.queue_limit:
            return None
        stored = _Entry(number=next(self._numbers), job=job, request=new.request, result=entry.result)
        stored.events += [entry.event] if entry.event else []
        self._entries[job.id] = stored
        self._requests[job.namespace, job.request_id] = job.id
        return job

    @override
    def update(self, job_id: str, decide: Callable[[Job], Transition]) -> Transition | None:
        with self._lock:
            entry = self._entries.get(job_id)
            if entry is None:
                return None
            known = entry.job
            transition = decide(known)
            if transition.event is not None:
                entry.job = transition.job
                entry.events.append(transition.event)
                entry.result = transition.result if transition.result is not None else entry.result
            entry.live = transition.live if transition.live is not None else entry.live
            if transition.ends_equal_jobs(known):
                for equal in self.duplicates(known.cache_key):
                    self._entries[equal.id].ended_equal = job_id
            return transition

    @override
    def claim(self, job_id: str, decide: Callable[[Job], Transition], *, lease_s: float) -> Transition | None:
        with self._lock:
            job = self.get(job_id)
            free = job is not None and job.state is State.QUEUED and (job.fresh or job.cache_key not in self._busy())
            transition = self.update(job_id, decide) if free else None
            return transition if transition is not None and transition.claimed else None

    @override
    def get(self, job_id: str) -> Job | None:
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.job if entry else None

    @override
    def find(self, namespace: str, request_id: str) -> Job | None:
        with self._lock:
            job_id = self._requests.get((namespace, request_id))
            return self._entries[job_id].job if job_id else None

    @override
    def request_of(self, job_id: str) -> bytes:
        with self._lock:
            return self._entries[job_id].request

    @override
    def result_of(self, job_id: str) -> bytes | None:
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.result if entry else None

    @override
    def results_of(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        found = {job_id: self.result_of(job_id) for job_id in job_ids}
        return {job_id: result for job_id, result in found.items() if result is not None}

    @override
    def live_of(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        with self._lock:
            found = {job_id: self._entries[job_id].live for job_id in job_ids if job_id in self._entries}
        return {job_id: live for job_id, live in found.items() if live is not None}

    @override
    def events(self, job_id: str, *, after: int, limit: int) -> Sequence[Event]:
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.events[after : after + limit] if entry else []

    @override
    def page(
        self, wanted: JobFilter, *, beyond: int | None, limit: int, oldest_first: bool = False
    ) -> tuple[Sequence[Job], int | None]:
        with self._lock:
            fitting = [entry for entry in self._entries.values() if _matches(entry.job, wanted)]
        if oldest_first:
            entries = [entry for entry in fitting if beyond is None or entry.number > beyond]
        else:
            entries = [entry for entry in reversed(fitting) if beyond is None or entry.number < beyond]
        shown = entries[:limit]
        return [entry.job for entry in shown], shown[-1].number if len(entries) > limit else None

    @override
    def payloads(self, *, after: int, limit: int) -> Sequence[Payloads]:
        with self._lock:
            later = [entry for entry in self._entries.values() if entry.number > after]
        return [Payloads(number=each.number, request=each.request, result=each.result) for each in later[:limit]]

    @override
    def forget(self, *, finished_before: float, limit: int) -> int:
        with self._lock:
            jobs = [entry.job for entry in self._entries.values()]
            old = [job for job in jobs if job.finished_at is not None and job.finished_at < finished_before][:limit]
            for job in old:
                del self._entries[job.id], self._requests[job.namespace, job.request_id]
        return len(old)

    @override
    def heads(self, torch_version: str, *, now: float = math.inf) -> Sequence[Head]:
        with self._lock:
            running = Counter(job.namespace for job in self._in(State.RUNNING))
            busy = self._busy()
            heads: dict[tuple[str, frozenset[tuple[str, str]]], Head] = {}
            for entry in self._entries.values():
                job = entry.job
                kind = job.namespace, frozenset(job.where.items())
                if job.state is not State.QUEUED or job.torch_version != torch_version or kind in heads:
                    continue
                if job.fresh or job.cache_key not in busy:
                    heads[kind] = Head(
                        number=entry.number,
                        job_id=job.id,
                        namespace=job.namespace,
                        running=running[job.namespace],
                        served_at=self._served_at(job.namespace, now),
                        where=job.where,
                    )
            return list(heads.values())

    @override
    def waiting(self) -> Sequence[Waiting]:
        with self._lock:
            kinds = Counter((job.torch_version, tuple(sorted(job.where.items()))) for job in self._in(State.QUEUED))
        return [Waiting(torch_version=each[0], where=dict(each[1]), jobs=kinds[each]) for each in kinds]

    @override
    def running(self) -> Sequence[Job]:
        with self._lock:
            return self._in(State.RUNNING)

    @override
    def duplicates(self, cache_key: str) -> Sequence[Job]:
        with self._lock:
            return [job for job in self._in(State.QUEUED) if job.cache_key == cache_key and not job.fresh]

    @override
    def ended_equal(self, job_id: str) -> Job | None:
        with self._lock:
            return self.get(self._entries[job_id].ended_equal)

    @override
    def answer(self, cache_key: str, hardware: Collection[str]) -> Job | None:
        with self._lock:
            answered = [job for job in self._in(State.SUCCEEDED) if job.reusable and not job.cached]
        found = [job for job in answered if job.cache_key == cache_key and job.hardware in hardware]
        return found[-1] if found else None

    @override
    def recent_answers(self, limit: int) -> Sequence[Job]:
        with self._lock:
            return [job for job in reversed(self._in(State.SUCCEEDED)) if not job.cached][:limit]

    @override
    def see(self, worker: Worker, *, forget_before: float, gone: Collection[str] = ()) -> None:
        with self._lock:
            left = [known for known in self._workers.values() if known.seen_at >= forget_before]
            kept = {known.id: known for known in left if known.id not in gone}
            self._workers = kept | {worker.id: worker}

    @override
    def workers(self) -> Sequence[Worker]:
        with self._lock:
            return sorted(self._workers.values(), key=lambda worker: -worker.seen_at)

    @override
    def hold(self, namespace: str, blobs: Mapping[str, int]) -> None:
        with self._lock:
            self._holdings.setdefault(namespace, {}).update(blobs)

    @override
    def held(self, namespace: str, sha256s: Collection[str]) -> set[str]:
        with self._lock:
            return set(self._holdings.get(namespace, {}).keys() & sha256s)

    @override
    def held_bytes(self, namespace: str, *, besides: Collection[str] = ()) -> int:
        with self._lock:
            return sum(size for sha256, size in self._holdings.get(namespace, {}).items() if sha256 not in besides)

    @override
    def release(self, sha256: str) -> None:
        with self._lock:
            for held in self._holdings.values():
                held.pop(sha256, None)

    @override
    def ping(self) -> None:
        """It is always there."""

    @override
    def stats(self) -> Stats:
        with self._lock:
            counts = Counter(entry.job.state for entry in self._entries.values())
            queued = [job.created_at for job in self._in(State.QUEUED)]
        return Stats(by_state={state: counts[state] for state in State}, oldest_queued_at=min(queued, default=None))

    @override
    def close(self) -> None:
        """Nothing is held."""

    def _in(self, state: State) -> list[Job]:
        return [entry.job for entry in self._entries.values() if entry.job.state is state]

    def _busy(self) -> set[str]:
        return {job.cache_key for job in self._in(State.RUNNING) if not job.fresh}

    def _served_at(self, namespace: str, now: float) -> float:
        jobs = (entry.job for entry in self._entries.values())
        claimed = (job.started_at or 0.0 for job in jobs if job.namespace == namespace and not job.cached)
        return max((at for at in claimed if at <= now), default=0.0)


def _matches(job: Job, wanted: JobFilter) -> bool:
    return (
        wanted.namespace in ("", job.namespace)
        and wanted.name in ("", job.name)
        and (not wanted.states or job.state in wanted.states)
        and job.id.startswith(wanted.id_prefix)
        and wanted.labels.items() <= job.labels.items()
    )
