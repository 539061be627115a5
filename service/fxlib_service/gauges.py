"""The gauges that Prometheus reads. Each scrape takes them from the store, so that a restart changes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from fxlib_service.events import EventBroker
from fxlib_service.job import State
from fxlib_service.model_figures import ModelFigures
from fxlib_service.stores.base import JobStore
from fxlib_service.workers import Workers

_TORCH_VERSIONS: Final = 20


class Gauges(Collector):
    """Collects the gauges, on the thread that answers the scrape."""

    def __init__(self, store: JobStore, workers: Workers, broker: EventBroker, models: ModelFigures) -> None:
        self._store = store
        self._workers = workers
        self._broker = broker
        self._models = models

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._queue()
        yield from self._live_workers()
        yield GaugeMetricFamily("fxlib_watchers", "Streams that follow a job", value=self._broker.watchers)
        yield from self._figures()

    def _queue(self) -> Iterator[Metric]:
        stats = self._store.stats()
        jobs = GaugeMetricFamily("fxlib_jobs", "Jobs that there are", labels=["state"])
        for state, count in stats.by_state.items():
            jobs.add_metric([state.value], count)
        yield jobs
        depth = stats.by_state[State.QUEUED]
        yield GaugeMetricFamily("fxlib_queue_depth", "Jobs that wait for a worker", value=depth)
        age = 0.0 if stats.oldest_queued_at is None else max(0.0, time.time() - stats.oldest_queued_at)
        yield GaugeMetricFamily(
            "fxlib_oldest_queued_age_seconds", "Time for which the oldest queued job has waited", value=age
        )

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
            labels=["model", "arm"],
        )
        gain = GaugeMetricFamily(
            "fxlib_model_gain_ratio",
            "Relative gain in the model's last job, and its interval (`low`, `value`, `high`), where it was measured",
            labels=["model", "bound"],
        )
        adopted = GaugeMetricFamily(
            "fxlib_model_adopted", "1 if the rewrite of the model's last job was adopted", labels=["model"]
        )
        for name, figures in self._models.rows():
            if figures.qps_original is not None:
                qps.add_metric([name, "original"], figures.qps_original)
            if figures.qps_optimized is not None:
                qps.add_metric([name, "optimized"], figures.qps_optimized)
            if figures.gain is not None:
                for bound in ("low", "value", "high"):
                    gain.add_metric([name, bound], getattr(figures.gain, bound))
            adopted.add_metric([name], float(figures.adopted))
        yield from (qps, gain, adopted)
