"""Quotas of a namespace: queued jobs, stored bytes, requests in flight, live reports, and the size of a trial."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from typing_extensions import override

from fxlib.spec.job import TrialOptions
from fxlib.v1 import jobs_pb2
from fxlib_service.blobs.base import CheckedBlob
from fxlib_service.config import Limits
from fxlib_service.errors import Code, ServiceError, Violation

_SOON_S: Final = 1.0
_LATER_S: Final = 60.0
MINUTE_S: Final = 60.0
_REMEMBERED_TENANTS: Final = 1_000
_UNSAID: Final = TrialOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The quota of one namespace. None in a field allows as much as the service's own limits do.

    Attributes:
        queued_jobs: number of jobs that may wait for a worker.
        stored_bytes: total size of its blobs and unfinished uploads, in bytes.
        requests_in_flight: number of calls that may be open at once, including streams.
        live_reports_per_minute: number of live reports in a minute, which may arrive all at once.
        trial_seconds: longest measurement that a job may ask for, in seconds.
        trial_processes: total number of trainers and servers that a job may ask for.
    """

    queued_jobs: int | None = None
    stored_bytes: int | None = None
    requests_in_flight: int | None = None
    live_reports_per_minute: int | None = None
    trial_seconds: float | None = None
    trial_processes: int | None = None


class Counts(ABC):
    """The short-lived counts that quotas limit: open calls and live reports."""

    @abstractmethod
    async def enter(self, namespace: str, allowed: int | None) -> bool:
        """Count a call of a namespace as open until `leave`, and return True, unless the allowed number are open."""

    @abstractmethod
    def leave(self, namespace: str) -> None:
        """Count a call as finished."""

    @abstractmethod
    async def live_report(self, tenant: str, per_minute: int) -> float:
        """Count a live report, or return the seconds until one fits; a whole minute's reports may come at once.

        Source: the generic cell rate algorithm, by virtual scheduling; ITU-T I.371, annex A.
        """


class OwnCounts(Counts):
    """The counts of one service, in its memory."""

    def __init__(self) -> None:
        self._calls = Counter[str]()
        self._live_due_s: dict[str, float] = {}
        """The time in seconds at which each tenant's recent live reports would end if they were evenly spread."""

    @override
    async def enter(self, namespace: str, allowed: int | None) -> bool:
        if allowed is not None and self._calls[namespace] >= allowed:
            return False
        self._calls[namespace] += 1
        return True

    @override
    def leave(self, namespace: str) -> None:
        self._calls[namespace] -= 1
        if not self._calls[namespace]:
            del self._calls[namespace]

    @override
    async def live_report(self, tenant: str, per_minute: int) -> float:
        now_s = time.monotonic()
        due_s = max(now_s, self._live_due_s.get(tenant, 0.0)) + MINUTE_S / per_minute
        if due_s > now_s + MINUTE_S:
            return due_s - now_s - MINUTE_S
        if len(self._live_due_s) >= _REMEMBERED_TENANTS:
            self._live_due_s = {name: at_s for name, at_s in self._live_due_s.items() if at_s > now_s}
        self._live_due_s[tenant] = due_s
        return 0.0


@dataclass(kw_only=True)
class Quotas:
    """The quotas of all namespaces, which change when the policy is read again.

    Attributes:
        general: quota of each namespace without one of its own.
        own: quotas of individual namespaces, by name.
        counts: the counts that the quotas limit.
    """

    general: Quota = Quota()
    own: Mapping[str, Quota] = field(default_factory=dict)
    counts: Counts = field(default_factory=OwnCounts, init=False, repr=False, compare=False)

    def take(self, newer: Quotas) -> None:
        """Use newer quotas from now on; calls in flight still count."""
        self.general, self.own = newer.general, newer.own

    def of(self, namespace: str | None) -> Quota:
        """Return the quota of a namespace. A caller without a namespace (None) has only the service's limits."""
        return Quota() if namespace is None else self.own.get(namespace, self.general)

    def queued(self, namespace: str, limits: Limits) -> int:
        """Return the number of queued jobs that a namespace may have."""
        own = self.of(namespace).queued_jobs
        return limits.queued_per_namespace if own is None else min(own, limits.queued_per_namespace)

    @asynccontextmanager
    async def in_flight(self, namespace: str | None) -> AsyncIterator[None]:
        """Count a call as in flight for the duration of the block.

        Raises:
            ServiceError: QUOTA_EXCEEDED; the call may be repeated soon. If counts are in a database, also
                STORAGE_UNAVAILABLE.
        """
        if namespace is None:
            yield
            return
        allowed, counts = self.of(namespace).requests_in_flight, self.counts
        if not await counts.enter(namespace, allowed):
            raise exceeded(namespace, "requests_in_flight", allowed or 0, retry_after_s=_SOON_S)
        try:
            yield
        finally:
            counts.leave(namespace)

    async def live_report(self, namespace: str | None, tenant: str, limits: Limits) -> None:
        """Count a live report of a tenant; all those allowed in a minute may come at once.

        Raises:
            ServiceError: QUOTA_EXCEEDED; the next report fits `retry_after_s` later.
        """
        own = self.of(namespace).live_reports_per_minute
        allowed = min(own or limits.live_reports_per_minute, limits.live_reports_per_minute)
        if wait_s := await self.counts.live_report(tenant, allowed):
            raise exceeded(tenant, "live_reports_per_minute", allowed, retry_after_s=max(wait_s, _SOON_S))

    def check_trial(self, request: jobs_pb2.OptimizeRequest, limits: Limits) -> None:
        """Refuse a job that asks for a longer or larger trial than its namespace may have.

        Raises:
            ServiceError: INVALID_REQUEST, with every field at fault.
        """
        own = self.of(request.namespace)
        seconds = min(limits.trial_s, own.trial_seconds or limits.trial_s)
        processes = min(limits.trial_processes, own.trial_processes or limits.trial_processes)
        asked = request.workload.trainers + len(request.workload.servers)
        budget_s = request.trial.budget_s if request.HasField("trial") else _UNSAID.budget_s
        violations = []
        if budget_s > seconds:
            violations.append(Violation(field="trial.budget_s", problem=f"must be at most {seconds:g} seconds here"))
        step_s = max(seconds, _UNSAID.step_timeout_s)  # a step that hangs holds the worker for this long
        if request.trial.step_timeout_s > step_s:
            problem = f"must be at most {step_s:g} seconds here"
            violations.append(Violation(field="trial.step_timeout_s", problem=problem))
        if asked > processes:
            problem = f"has {asked} trainers and servers, and may have {processes} here"
            violations.append(Violation(field="workload", problem=problem))
        if violations:
            raise ServiceError(Code.INVALID_REQUEST, violations=violations)


class StorageQuota:
    """Counts open uploads, each with its announced size, against the quota of stored bytes."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._open: defaultdict[str, dict[object, tuple[str, int]]] = defaultdict(dict)

    def uploaded(self, namespace: str) -> set[str]:
        """Return the SHA-256s of the blobs whose uploads are open."""
        return {sha256 for sha256, _ in self._open[namespace].values()} if namespace in self._open else set()

    @contextmanager
    def uploading(
        self, namespace: str, blob: CheckedBlob, *, held: int, unfinished: Mapping[str, int]
    ) -> Iterator[None]:
        """Count an upload for the duration of the block.

        Args:
            namespace: the namespace that uploads.
            blob: the blob that was announced.
            held: size of the blobs that the namespace has and does not upload, in bytes.
            unfinished: sizes of its unfinished uploads in bytes, by SHA-256.

        Raises:
            ServiceError: QUOTA_EXCEEDED.
        """
        allowed, opened, mine = self._quotas.of(namespace).stored_bytes, self._open[namespace], object()
        announced = Counter({blob.sha256: blob.size})
        for sha256, size in opened.values():
            announced[sha256] = max(announced[sha256], size)  # several streams may send one blob
        if allowed is not None and held + sum({**unfinished, **announced}.values()) > allowed:
            raise exceeded(namespace, "stored_bytes", allowed, retry_after_s=_LATER_S)
        opened[mine] = blob.sha256, blob.size
        try:
            yield
        finally:
            del opened[mine]
            if not opened:
                self._open.pop(namespace, None)


def exceeded(namespace: str, quota: str, allowed: float, *, retry_after_s: float) -> ServiceError:
    """Return the refusal for a namespace, or another tenant, that has reached a quota."""
    message = f"{namespace!r} has reached its quota {quota} = {allowed:g}"
    return ServiceError(
        Code.QUOTA_EXCEEDED, message, metadata={"namespace": namespace, "quota": quota}, retry_after_s=retry_after_s
    )


def merged(general: Quota, own: Mapping[str, float]) -> Quota:
    """Return the general quota, with the fields that a namespace sets itself replaced."""
    return replace(general, **own)  # type: ignore[arg-type]  # the policy's reader has checked names and kinds
