"""The metrics for Prometheus: counters, histograms, and gauges. Every label has a bounded set of values.

Each scrape reads the gauges from the store, so that a restart changes nothing. While the database is unreachable, the
gauges of jobs are left out, and another gauge says so. The latest figures of each model, from trials and from training,
are kept for a bounded number of models; `stored_figures` reads those of other services from the store.
"""

from __future__ import annotations

import collections
import math
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from fxlib.reasons import Reason
from fxlib.v1 import jobs_pb2
from fxlib_service.check_pool import CheckPool
from fxlib_service.clock import Clock
from fxlib_service.errors import ServiceError
from fxlib_service.events import EventBroker
from fxlib_service.field_checks import PHASES
from fxlib_service.in_flight import InFlight
from fxlib_service.job import Job, State
from fxlib_service.lifecycle import Transition
from fxlib_service.retention import Forgotten
from fxlib_service.store_probe import StoreProbe
from fxlib_service.workers import Workers

_OTHER: Final = "other"
_RPC_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_JOB_BUCKETS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_PASS_BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
_PHASES: Final = ("fetch", "start", *PHASES, "timeline")
_COUNTED_AT_ONCE: Final = 64 << 10
"""Size in bytes of the largest result that is read for counting on the event loop."""
_ACTIONS: Final = ("moved", "merged", "left_alone")
_DECISIONS: Final = {jobs_pb2.DECISION_ADOPT: "adopt", jobs_pb2.DECISION_KEEP_ORIGINAL: "keep_original"}

_Model = tuple[str, str]
"""A model's namespace and name."""

_KEPT_PER_SHOWN: Final = 10

_TORCH_VERSIONS: Final = 20
_NAMESPACE: Final = "fxlib_namespace"
"""The label for a model's namespace. Kubernetes gives every target its own label `namespace`."""


class Metrics:
    """Counters and histograms of events. Gauges of the current state are in `Gauges`.

    Args:
        registry: the registry that the metrics are added to.
        models: records the figures of every answer.
        passes: names of the passes that have a label of their own; all others share "other".
    """

    def __init__(self, registry: CollectorRegistry, models: ModelFigures, passes: Collection[str]) -> None:
        self._models = models
        self._passes = frozenset(passes)
        self._rpc_of = dict[tuple[str, str], Histogram]()
        self._answers_of = dict[tuple[str, str, str], Counter]()
        self._counting = ThreadPoolExecutor(1, thread_name_prefix="fxlib-count")
        self._rpc_s = Histogram(
            "fxlib_rpc_seconds", "Duration of calls, and their number as `_count`", ["method", "code"],
            buckets=_RPC_BUCKETS, registry=registry,
        )  # fmt: skip
        self._refused = Counter(
            "fxlib_calls_refused", "Calls refused because of a limit, by its name", ["limit"], registry=registry
        )
        self._phase_s = Histogram(
            "fxlib_job_phase_seconds",
            "Time that jobs waited for their first worker, and spent in the phases of the work", ["phase"],
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
        """Count a finished call, with its duration in seconds."""
        counted = self._rpc_of.get((method, code))
        if counted is None:
            counted = self._rpc_of[method, code] = self._rpc_s.labels(method, code)
        counted.observe(seconds)

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

    def live(self, model: _Model, figures: jobs_pb2.LiveFigures, went_back: bool) -> None:
        """Record a launcher's report about its steps. `went_back` says that it has just gone back to its original."""
        self._models.record_live(model, figures)
        if went_back:
            self._went_back.inc()

    def heard(self, transition: Transition) -> None:
        """Count a transition: a job that started, ended, or got its answer."""
        job = transition.job
        if job.just_began and job.started_at is not None:
            self._phase_s.labels("queued").observe(max(0.0, job.started_at - job.created_at), _example(job))
        if job.state.finished:
            self._finished.labels(job.state.value).inc(exemplar=_example(job))
        if transition.result is None:
            return
        if len(transition.result) <= _COUNTED_AT_ONCE:
            self._answered(job, transition.result)
        else:
            self._counting.submit(self._answered, job, transition.result)

    def _answered(self, job: Job, data: bytes) -> None:
        cached = str(job.cached).lower()
        answer, *variants = _all_decided(data)
        counted = self._answers_of.get((*answer, cached))
        if counted is None:
            counted = self._answers_of[*answer, cached] = self._answers.labels(*answer, cached)
        counted.inc(exemplar=_example(job))
        for variant in variants:
            self._variant_answers.labels(*variant, cached).inc()
        if job.cached:
            return
        result = jobs_pb2.JobResult.FromString(data)
        self._models.record((job.namespace, job.name), Figures.of(result, job_id=job.id))
        for phase, seconds in result.phase_seconds.items():
            if phase in _PHASES:
                self._phase_s.labels(phase).observe(max(0.0, seconds), _example(job))
        for each in result.passes:
            name = each.name if each.name in self._passes else _OTHER
            self._pass_s.labels(name).observe(max(0.0, each.seconds))
            self._pass_changes.labels(name).inc(max(0, each.changes))
        for call in result.calls:
            action = call.action if call.action in _ACTIONS else _OTHER
            self._calls.labels(action, _reason(call.reason_code)).inc()


def _all_decided(data: bytes) -> tuple[tuple[str, str], ...]:
    """Return the decision and reason of an answer and of each of its variants; cached answers count each time."""
    return _remembered(data) if len(data) <= _COUNTED_AT_ONCE else _read_decisions(data)


def _read_decisions(data: bytes) -> tuple[tuple[str, str], ...]:
    result = jobs_pb2.JobResult.FromString(data)
    return (_decided(result), *(_decided(variant.result) for variant in result.variants))


_remembered: Final = lru_cache(maxsize=64)(_read_decisions)


def _example(job: Job) -> dict[str, str]:
    """Return the exemplar that leads from a figure to a job. It is exposed where OpenMetrics is requested."""
    return {"job_id": job.id}


def _decided(result: jobs_pb2.JobResult) -> tuple[str, str]:
    return _DECISIONS.get(result.decision, _OTHER), _reason(result.reason_code)


def _reason(code: str) -> str:
    return code if code in Reason.__members__ else _OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The measurements of a model's last answered job. A figure is None if it was not measured.

    Attributes:
        qps_original: samples per second of the original.
        qps_optimized: samples per second of the rewritten module.
        gain: relative gain, with its confidence interval.
        adopted: whether the rewrite was adopted.
        job_id: id of the job.
    """

    qps_original: float | None
    qps_optimized: float | None
    gain: jobs_pb2.Estimate | None
    adopted: bool
    job_id: str

    @staticmethod
    def of(result: jobs_pb2.JobResult, *, job_id: str) -> Figures:
        """Read the figures from the answer to a job."""
        return Figures(
            qps_original=result.qps_original.value if result.HasField("qps_original") else None,
            qps_optimized=result.qps_optimized.value if result.HasField("qps_optimized") else None,
            gain=result.gain if result.HasField("gain") else None,
            adopted=result.decision == jobs_pb2.DECISION_ADOPT,
            job_id=job_id,
        )


class ModelFigures:
    """Figures by namespace and name. The models answered most often have rows of their own; all others share one.

    Args:
        shown: number of models that have a row of their own.
    """

    def __init__(self, *, shown: int) -> None:
        self._shown = shown
        self._rows: dict[_Model, tuple[int, Figures]] = {}
        self._live: dict[_Model, jobs_pb2.LiveFigures] = {}
        self._recording = Lock()  # large results are counted on another thread

    def record(self, model: _Model, figures: Figures) -> None:
        """Record the figures of an answer.

        If there are too many models, one of those answered least often gives way, the one answered longest ago.
        """
        with self._recording:
            if model not in self._rows and len(self._rows) >= self._shown * _KEPT_PER_SHOWN:
                del self._rows[min(self._rows, key=lambda each: self._rows[each][0])]
            count, _ = self._rows.pop(model, (0, figures))
            self._rows[model] = count + 1, figures

    def record_live(self, model: _Model, live: jobs_pb2.LiveFigures) -> None:
        """Record a report of a launcher that trains the model.

        If there are too many models, the namespace that has most loses the one that was reported longest ago.
        """
        with self._recording:
            self._live.pop(model, None)
            self._live[model] = live
            if len(self._live) > self._shown * _KEPT_PER_SHOWN:
                ((most, _),) = collections.Counter(namespace for namespace, _ in self._live).most_common(1)
                del self._live[next(each for each in self._live if each[0] == most)]

    def answered_by(self) -> dict[_Model, str]:
        """Return the ids of the jobs whose answers have the models' figures."""
        with self._recording:
            return {model: figures.job_id for model, (_, figures) in self._rows.items()}

    def reported_at(self, model: _Model) -> float:
        """Return when the model's live figures were reported, in nanoseconds since the epoch; -inf if none were."""
        live = self._live.get(model)
        return -math.inf if live is None else live.at.ToNanoseconds()

    def live_rows(self) -> Iterator[tuple[_Model, jobs_pb2.LiveFigures]]:
        """Yield the models reported last, as many as may have a row of their own.

        Namespaces take turns, since whoever reports may give a model any number of names.
        """
        with self._recording:
            rows = list(reversed(self._live.items()))
        turns = collections.Counter[str]()
        in_turn = list[tuple[int, tuple[_Model, jobs_pb2.LiveFigures]]]()
        for row in rows:
            namespace = row[0][0]
            in_turn.append((turns[namespace], row))
            turns[namespace] += 1
        in_turn.sort(key=lambda each: each[0])
        yield from (row for _, row in in_turn[: self._shown])

    def rows(self) -> Iterator[tuple[_Model, Figures]]:
        """Yield models and figures; "other" has the figures of the latest answer to any model without its own row."""
        rows = list(self._rows.items())
        by_count = sorted(rows, key=lambda row: row[1][0], reverse=True)
        shown = {model for model, _ in by_count[: self._shown] if model != (_OTHER, _OTHER)}
        latest: Figures | None = None
        for model, (_, figures) in rows:
            if model in shown:
                yield model, figures
            else:
                latest = figures
        if latest is not None:
            yield (_OTHER, _OTHER), latest


class Gauges(Collector):
    """Collects the gauges on the thread that answers the scrape."""

    def __init__(
        self,
        probe: StoreProbe,
        workers: Workers,
        *,
        broker: EventBroker,
        models: ModelFigures,
        clock: Clock,
        in_flight: InFlight,
        checks: CheckPool,
        folder: Path,
    ) -> None:
        self._probe = probe
        self._workers = workers
        self._broker = broker
        self._models = models
        self._clock = clock
        self._in_flight = in_flight
        self._checks = checks
        self._folder = folder

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._queue()
        yield from self._live_workers()
        yield GaugeMetricFamily("fxlib_watchers", "Streams that follow a job", value=self._broker.watchers)
        yield from self._bytes_and_calls()
        yield from self._disk()
        yield from self._figures()
        yield from self._live_figures()

    def _bytes_and_calls(self) -> Iterator[Metric]:
        calls = self._in_flight.calls.held
        yield GaugeMetricFamily("fxlib_calls_open", "Calls that are open, streams included", value=calls)
        room = GaugeMetricFamily(
            "fxlib_bytes_in_flight", "Room that is taken by messages on their way", labels=["direction"]
        )
        waiting = GaugeMetricFamily("fxlib_calls_waiting", "Calls that wait for such room", labels=["direction"])
        for direction in ("requests", "uploads", "answers"):
            budget = getattr(self._in_flight, direction)
            room.add_metric([direction], budget.held)
            waiting.add_metric([direction], budget.waiting)
        yield from (room, waiting)
        yield GaugeMetricFamily(
            "fxlib_checks_waiting",
            "Checks of graphs, requests and results that wait for a process",
            value=self._checks.turns.waiting,
        )

    def _queue(self) -> Iterator[Metric]:
        found = self._probe.ask(lambda store: (store.stats(), store.waiting()))
        yield GaugeMetricFamily(
            "fxlib_database_up",
            "1 if the database answers; otherwise the gauges of jobs are missing",
            value=float(found is not None),
        )
        if found is None:
            return
        stats, waiting = found
        jobs = GaugeMetricFamily("fxlib_jobs", "Jobs that there are", labels=["state"])
        for state, count in stats.by_state.items():
            jobs.add_metric([state.value], count)
        yield jobs
        depth = stats.by_state[State.QUEUED]
        yield GaugeMetricFamily("fxlib_queue_depth", "Jobs that wait for a worker", value=depth)
        stranded = sum(each.jobs for each in waiting if self._workers.missing(each.torch_version, each.where))
        yield GaugeMetricFamily(
            "fxlib_queue_without_worker",
            "Queued jobs that no live worker could take: none has their torch version, or their labels",
            value=stranded,
        )
        age = 0.0 if stats.oldest_queued_at is None else max(0.0, self._clock.now() - stats.oldest_queued_at)
        yield GaugeMetricFamily(
            "fxlib_oldest_queued_age_seconds", "Time for which the oldest queued job has waited", value=age
        )

    def _disk(self) -> Iterator[Metric]:
        folder = self._folder.absolute()
        with suppress(OSError):  # a folder that cannot be examined has no figure
            usage = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists()))
            yield GaugeMetricFamily("fxlib_data_free_bytes", "Room on the disk of the data folder", value=usage.free)
            yield GaugeMetricFamily("fxlib_data_size_bytes", "Size of the disk of the data folder", value=usage.total)

    def _live_workers(self) -> Iterator[Metric]:
        live = collections.Counter(worker.torch_version for worker in self._workers.live())
        workers = GaugeMetricFamily(
            "fxlib_workers_live", "Workers heard of in the last minute and a half", labels=["torch_version"]
        )
        for version, count in live.most_common(_TORCH_VERSIONS):
            workers.add_metric([version], count)
        if rest := sum(count for _, count in live.most_common()[_TORCH_VERSIONS:]):
            workers.add_metric(["other"], rest)
        yield workers

    def _figures(self) -> Iterator[Metric]:
        qps = GaugeMetricFamily(
            "fxlib_model_qps",
            "Samples per second of the model's last job, `original` and `optimized`, where it was measured",
            labels=[_NAMESPACE, "model", "arm"],
        )
        gain = GaugeMetricFamily(
            "fxlib_model_gain_ratio",
            "Relative gain in the model's last job, and its interval (`low`, `value`, `high`), where it was measured",
            labels=[_NAMESPACE, "model", "bound"],
        )
        adopted = GaugeMetricFamily(
            "fxlib_model_adopted", "1 if the rewrite of the model's last job was adopted", labels=[_NAMESPACE, "model"]
        )
        for model, figures in self._models.rows():
            if figures.qps_original is not None:
                qps.add_metric([*model, "original"], figures.qps_original)
            if figures.qps_optimized is not None:
                qps.add_metric([*model, "optimized"], figures.qps_optimized)
            if figures.gain is not None:
                for bound in ("low", "value", "high"):
                    gain.add_metric([*model, bound], getattr(figures.gain, bound))
            adopted.add_metric(list(model), float(figures.adopted))
        yield from (qps, gain, adopted)

    def _live_figures(self) -> Iterator[Metric]:
        qps = GaugeMetricFamily(
            "fxlib_model_live_qps",
            "Samples per second of late, as a launcher of the model reports them, `original` and `optimized`",
            labels=[_NAMESPACE, "model", "arm"],
        )
        gain = GaugeMetricFamily(
            "fxlib_model_live_gain_ratio",
            "Relative gain as a launcher of the model sees it, and its interval (`low`, `value`, `high`)",
            labels=[_NAMESPACE, "model", "bound"],
        )
        for model, live in self._models.live_rows():
            for arm in ("original", "optimized"):
                if live.HasField(f"qps_{arm}"):
                    qps.add_metric([*model, arm], getattr(live, f"qps_{arm}"))
            if live.HasField("gain"):
                for bound in ("low", "value", "high"):
                    gain.add_metric([*model, bound], getattr(live.gain, bound))
        yield from (qps, gain)
