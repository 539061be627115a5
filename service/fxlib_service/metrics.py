"""The counters and histograms that Prometheus reads. Every label has a bounded set of values."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from fxlib.reasons import Reason
from fxlib.v1 import jobs_pb2
from fxlib_service.errors import ServiceError
from fxlib_service.field_checks import PHASES
from fxlib_service.job import Job, State
from fxlib_service.lifecycle import Transition
from fxlib_service.model_figures import Figures, Model, ModelFigures
from fxlib_service.retention import Forgotten

OTHER: Final = "other"
_RPC_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_JOB_BUCKETS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_PASS_BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
_PHASES: Final = ("fetch", "start", *PHASES, "timeline")
_COUNTED_AT_ONCE: Final = 64 << 10
"""Size in bytes of the largest result that is counted on the event loop."""
_ACTIONS: Final = ("moved", "merged", "left_alone")
_DECISIONS: Final = {jobs_pb2.DECISION_ADOPT: "adopt", jobs_pb2.DECISION_KEEP_ORIGINAL: "keep_original"}


class Metrics:
    """Counters and histograms of events. Gauges of the present state are in `gauges`.

    Args:
        registry: the registry that the metrics are added to.
        models: records the figures of every answer.
        passes: names of the passes that have a label of their own; all others share "other".
    """

    def __init__(self, registry: CollectorRegistry, models: ModelFigures, passes: Collection[str]) -> None:
        self._models = models
        self._passes = frozenset(passes)
        self._counting = ThreadPoolExecutor(1, thread_name_prefix="fxlib-count")
        self._rpc_s = Histogram(
            "fxlib_rpc_seconds", "Duration of calls, and their number as `_count`", ["method", "code"],
            buckets=_RPC_BUCKETS, registry=registry,
        )  # fmt: skip
        self._refused = Counter(
            "fxlib_calls_refused", "Calls refused because of a limit, by its name", ["limit"], registry=registry
        )
        self._phase_s = Histogram(
            "fxlib_job_phase_seconds", "Time that jobs spent in the queue, and in the phases of the work", ["phase"],
            buckets=_JOB_BUCKETS, registry=registry,
        )  # fmt: skip
        self._pass_s = Histogram(
            "fxlib_pass_seconds", "Time that passes took", ["pass"], buckets=_PASS_BUCKETS, registry=registry
        )
        self._pass_changes = Counter("fxlib_pass_changes", "Changes made by passes", ["pass"], registry=registry)
        self._calls = Counter(
            "fxlib_calls", "Remote calls moved, merged or left alone, and why", ["action", "reason"], registry=registry
        )
        self._finished = Counter("fxlib_jobs_finished", "Jobs that ended", ["state"], registry=registry)
        self._answers = Counter(
            "fxlib_answers",
            "Answers given",
            ["decision", "reason", "cached"],
            registry=registry,
        )
        self._variant_answers = Counter(
            "fxlib_variant_answers",
            "Answers given about variants of a job's step",
            ["decision", "reason", "cached"],
            registry=registry,
        )
        self._expired = Counter("fxlib_leases_expired", "Workers lost with a job", registry=registry)

        self._went_back = Counter(
            "fxlib_jobs_went_back",
            "Jobs whose launcher went back to its original, since the live gain fell below its promise",
            registry=registry,
        )
        self._jobs_forgotten = Counter(
            "fxlib_jobs_forgotten", "Finished jobs that were kept long enough, and deleted", registry=registry
        )
        self._blobs_deleted = Counter(
            "fxlib_blobs_deleted", "Blobs that no job named for long enough, and that were deleted", registry=registry
        )

    def rpc(self, method: str, code: str, seconds: float) -> None:
        """Count a call that ended, with its duration in seconds."""
        self._rpc_s.labels(method, code).observe(seconds)

    def refused(self, refusal: ServiceError) -> None:
        """Count a refusal, if a limit was its reason."""
        if limit := refusal.metadata.get("limit") or refusal.metadata.get("quota"):
            self._refused.labels(limit).inc()

    def lease_expired(self) -> None:
        """Count a lease that expired."""
        self._expired.inc()

    def forgotten(self, found: Forgotten) -> None:
        """Count the jobs and blobs that retention has deleted."""
        self._jobs_forgotten.inc(found.jobs)
        self._blobs_deleted.inc(found.blobs)

    def live(self, model: Model, figures: jobs_pb2.LiveFigures, went_back: bool) -> None:
        """Take what a launcher reports of its own steps; `went_back`: it has just gone back to its original."""
        self._models.record_live(model, figures)
        if went_back:
            self._went_back.inc()

    def heard(self, transition: Transition) -> None:
        """Count what a transition means: a job that started, ended, or got its answer."""
        job = transition.job
        if job.state is State.RUNNING and transition.event is not None and job.started_at == transition.event.at:
            self._phase_s.labels("queued").observe(max(0.0, job.started_at - job.created_at))
        if job.state.finished:
            self._finished.labels(job.state.value).inc()
        if transition.result is None:
            return
        if len(transition.result) <= _COUNTED_AT_ONCE:
            self._answered(job, transition.result)
        else:
            self._counting.submit(self._answered, job, transition.result)

    def _answered(self, job: Job, data: bytes) -> None:
        result = jobs_pb2.JobResult.FromString(data)
        cached = str(job.cached).lower()
        self._answers.labels(*_decided(result), cached).inc()
        for variant in result.variants:
            self._variant_answers.labels(*_decided(variant.result), cached).inc()
        if job.cached:
            return
        self._models.record((job.namespace, job.name), Figures.of(result))
        for phase, seconds in result.phase_seconds.items():
            if phase in _PHASES:
                self._phase_s.labels(phase).observe(max(0.0, seconds))
        for each in result.passes:
            name = each.name if each.name in self._passes else OTHER
            self._pass_s.labels(name).observe(max(0.0, each.seconds))
            self._pass_changes.labels(name).inc(max(0, each.changes))
        for call in result.calls:
            action = call.action if call.action in _ACTIONS else OTHER
            self._calls.labels(action, _reason(call.reason_code)).inc()


def _decided(result: jobs_pb2.JobResult) -> tuple[str, str]:
    return _DECISIONS.get(result.decision, OTHER), _reason(result.reason_code)


def _reason(code: str) -> str:
    return code if code in Reason.__members__ else OTHER
