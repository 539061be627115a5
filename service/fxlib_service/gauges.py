"""The gauges that Prometheus reads. Each scrape takes them from the store, so that a restart changes nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from fxlib_service.check_pool import CheckPool
from fxlib_service.clock import Clock
from fxlib_service.events import EventBroker
from fxlib_service.in_flight import InFlight
from fxlib_service.job import State
from fxlib_service.model_figures import ModelFigures
from fxlib_service.stores.base import JobStore
from fxlib_service.workers import Workers

_TORCH_VERSIONS: Final = 20
_NAMESPACE: Final = "fxlib_namespace"
"""The label for a model's namespace. Kubernetes gives every target a label `namespace` of its own."""


class Gauges(Collector):
    """Collects the gauges, on the thread that answers the scrape."""

    def __init__(
        self,
        store: JobStore,
        workers: Workers,
        *,
        broker: EventBroker,
        models: ModelFigures,
        clock: Clock,
        in_flight: InFlight,
        checks: CheckPool,
        folder: Path,
    ) -> None:
        self._store = store
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
        stats = self._store.stats()
        jobs = GaugeMetricFamily("fxlib_jobs", "Jobs that there are", labels=["state"])
        for state, count in stats.by_state.items():
            jobs.add_metric([state.value], count)
        yield jobs
        depth = stats.by_state[State.QUEUED]
        yield GaugeMetricFamily("fxlib_queue_depth", "Jobs that wait for a worker", value=depth)
        stranded = sum(
            each.jobs for each in self._store.waiting() if self._workers.missing(each.torch_version, each.where)
        )
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
        with suppress(OSError):  # a folder that cannot be looked at has no figure
            usage = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists()))
            yield GaugeMetricFamily("fxlib_data_free_bytes", "Room on the disk of the data folder", value=usage.free)
            yield GaugeMetricFamily("fxlib_data_size_bytes", "Size of the disk of the data folder", value=usage.total)

    def _live_workers(self) -> Iterator[Metric]:
        live = Counter(worker.torch_version for worker in self._workers.live())
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
