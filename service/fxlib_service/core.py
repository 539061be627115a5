"""Assembles the parts of a service; only the sockets are left to `server`."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from fxlib.protocol import catalogue_to_proto
from fxlib_service.admission import Admission
from fxlib_service.background import Background
from fxlib_service.blobs.base import BlobStore
from fxlib_service.check_pool import CheckPool
from fxlib_service.clock import Clock
from fxlib_service.config import Config
from fxlib_service.dispatch import Dispatcher
from fxlib_service.equal_jobs import EqualJobs
from fxlib_service.events import EventBroker
from fxlib_service.holdings import Holdings
from fxlib_service.in_flight import InFlight
from fxlib_service.leases import Leases, MemoryLeases
from fxlib_service.ledger import Ledger
from fxlib_service.metrics import Gauges, Metrics, ModelFigures
from fxlib_service.policy import Policy
from fxlib_service.quotas import Quotas, StorageQuota
from fxlib_service.reserve import Reserve
from fxlib_service.retention import Retention
from fxlib_service.servicers.blobs import BlobServicer
from fxlib_service.servicers.optimizer import OptimizerServicer
from fxlib_service.servicers.workers import WorkerServicer
from fxlib_service.shared_database import Sharing, StoredCounts, StoredLeases
from fxlib_service.store_probe import StoreProbe
from fxlib_service.stored_figures import StoredFigures
from fxlib_service.stores.base import JobStore
from fxlib_service.stores.postgres import PostgresJobStore
from fxlib_service.submit import Submit
from fxlib_service.workers import Workers

_REMEMBERED_PER_LABEL = 4
_DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The parts that the server uses, as do tests without a network."""

    optimizer: OptimizerServicer
    blobs: BlobServicer
    workers: WorkerServicer
    dispatcher: Dispatcher
    sharing: Sharing | None
    figures: StoredFigures
    blob_store: BlobStore
    retention: Retention | None
    broker: EventBroker
    ledger: Ledger
    in_flight: InFlight
    checks: CheckPool
    metrics: Metrics
    probe: StoreProbe
    registry: CollectorRegistry
    clock: Clock

    async def close(self) -> None:
        """End the waiting calls, finish the work under way, and close the store."""
        self.dispatcher.close()
        self.broker.close()
        self.probe.close()
        await self.ledger.close()
        self.checks.close()


async def make_core(
    config: Config,
    store: JobStore,
    blobs: BlobStore,
    policy: Policy | None = None,
    *,
    clock: Clock | None = None,
    reserve: Reserve | None = None,
) -> Core:
    """Assemble a service on its stores, and recover the workers, leases and figures that the stores hold.

    With a policy, namespaces are isolated: each has its own blobs and, unless `share_results` is set, its own answers.
    Without a reserve, nothing is refused before the disk is full.
    """
    clock = clock or Clock()
    broker, background, registry = EventBroker(), Background(), _registry()
    models = ModelFigures(shown=config.model_labels)
    metrics = Metrics(registry, models, [each.name for each in catalogue_to_proto().passes])
    ledger = Ledger(store, broker, background, clock=clock, reserve=reserve)
    shared = store if isinstance(store, PostgresJobStore) else None
    live_s = config.limits.claim_wait_s + config.lease_s
    workers = Workers(ledger, live_s=live_s, shared=shared is not None, clock=clock)
    leases: Leases = (
        MemoryLeases(duration_s=config.lease_s)
        if shared is None
        else StoredLeases(ledger, shared, duration_s=config.lease_s)
    )
    admission = Admission(blobs, config.limits, store, clock)
    holdings = Holdings(ledger, admission, kept=policy is not None)
    equal = EqualJobs(ledger, holdings, background)
    dispatcher = Dispatcher(ledger, workers, leases, background, equal=equal, on_expiry=metrics.lease_expired)
    in_flight = InFlight(config.limits)
    submit = Submit(
        ledger,
        admission,
        holdings,
        workers,
        turns=in_flight.turns,
        limits=config.limits,
        policy=policy,
        reserve=reserve,
    )
    quotas = Quotas() if policy is None else policy.quotas
    sharing = None
    if shared is not None:
        quotas.counts = counts = StoredCounts(ledger, shared, background)
        sharing = Sharing(ledger, shared, dispatcher, workers, counts)
    ledger.listeners += [metrics.heard, dispatcher.heard, submit.heard, equal.heard]
    await workers.recall()
    await dispatcher.recover()
    figures = StoredFigures(models, ledger, limit=_REMEMBERED_PER_LABEL * config.model_labels)
    await figures.recall()
    probe = StoreProbe(store)
    registry.register(
        Gauges(
            probe,
            workers,
            broker=broker,
            models=models,
            clock=clock,
            in_flight=in_flight,
            checks=admission.checks,
            folder=config.data,
        )
    )
    return Core(
        optimizer=OptimizerServicer(
            ledger, broker, submit, workers, config.limits, quotas=quotas, clock=clock, on_live=metrics.live
        ),
        blobs=BlobServicer(blobs, holdings, StorageQuota(quotas), config.limits, leases=leases, reserve=reserve),
        workers=WorkerServicer(dispatcher, admission, holdings, config.limits),
        dispatcher=dispatcher,
        sharing=sharing,
        figures=figures,
        blob_store=blobs,
        retention=_retention(config, ledger, blobs, metrics, clock) if config.keep_days else None,
        broker=broker,
        ledger=ledger,
        in_flight=in_flight,
        checks=admission.checks,
        metrics=metrics,
        probe=probe,
        registry=registry,
        clock=clock,
    )


def _retention(config: Config, ledger: Ledger, blobs: BlobStore, metrics: Metrics, clock: Clock) -> Retention:
    return Retention(
        ledger,
        blobs,
        clock=clock,
        keep_s=config.keep_days * _DAY_S,
        spare_s=config.abandon_uploads_s,
        count=metrics.forgotten,
    )


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry
