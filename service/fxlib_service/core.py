"""Assembles the parts of a service; only the sockets are left to `server`.

Services that share a database keep leases in it, and learn from it what the others did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from typing_extensions import override

from fxlib.protocol import catalogue_to_proto
from fxlib.v1 import jobs_pb2
from fxlib_service.admission import Admission
from fxlib_service.background import Background
from fxlib_service.blobs.base import BlobStore
from fxlib_service.check_pool import CheckPool
from fxlib_service.clock import Clock
from fxlib_service.config import Config
from fxlib_service.dispatch import Dispatcher
from fxlib_service.errors import ServiceError
from fxlib_service.events import EventBroker
from fxlib_service.holdings import Holdings
from fxlib_service.in_flight import InFlight
from fxlib_service.job import State
from fxlib_service.leases import Lease, Leases, MemoryLeases
from fxlib_service.ledger import Ledger
from fxlib_service.metrics import Figures, Gauges, Metrics, ModelFigures
from fxlib_service.policy import Policy
from fxlib_service.quotas import Quotas, StorageQuota
from fxlib_service.reserve import Reserve
from fxlib_service.retention import Retention
from fxlib_service.servicers.blobs import BlobServicer
from fxlib_service.servicers.optimizer import OptimizerServicer
from fxlib_service.servicers.workers import WorkerServicer
from fxlib_service.storage_faults import in_full
from fxlib_service.store_probe import StoreProbe
from fxlib_service.stored_counts import StoredCounts
from fxlib_service.stores.base import JobStore
from fxlib_service.stores.postgres import Change, PostgresJobStore
from fxlib_service.submit import EqualJobs, Submit
from fxlib_service.workers import Workers

_AWAY_S: Final = 1.0
_RECALL_S: Final = 3.0

logger = logging.getLogger(__name__)
_REMEMBERED_PER_LABEL = 4
_DAY_S = 24 * 3600.0


class _StoredLeases(Leases):
    """Leases in the database, which any service may extend or expire. Each claim stores its own lease."""

    def __init__(self, ledger: Ledger, store: PostgresJobStore, *, duration_s: float) -> None:
        self._ledger = ledger
        self._store = store
        self.duration_s = duration_s

    @override
    def grant(self, lease: Lease) -> None:
        """Do nothing: the claim has stored the lease."""

    @override
    async def extend(self, job_id: str, token: str) -> Lease | None:
        return await self._ledger.write(self._store.extend, job_id, token, self.duration_s)

    @override
    async def holder(self, job_id: str) -> str:
        job = await self._ledger.read(self._store.get, job_id)
        return job.measured_by if job is not None and job.state is State.RUNNING else ""

    @override
    async def holds(self, token: str) -> bool:
        return await self._ledger.read(self._store.holds, token)

    @override
    def end(self, job_id: str) -> None:
        """Do nothing: a job that does not run has no lease."""

    @override
    def postpone(self, seconds: float) -> None:
        """Do nothing: `take_expired` goes by the last time that any of the services looked."""

    @override
    async def take_expired(self) -> Sequence[Lease]:
        return await self._ledger.write(self._store.take_expired, self.duration_s)


class _Sharing:
    """Passes the actions of other services on to this one's watchers and workers."""

    def __init__(
        self, ledger: Ledger, store: PostgresJobStore, dispatcher: Dispatcher, workers: Workers, counts: StoredCounts
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._dispatcher = dispatcher
        self._workers = workers
        self._counts = counts

    async def follow(self) -> None:
        """Pass on the changes of other services until this task is cancelled.

        Whenever changes may have been missed, watchers go back to the store, and waiting workers look for jobs.
        """
        away = False
        while True:
            try:
                async with aclosing(self._store.changes()) as changes:
                    async for change in changes:
                        if change is None and away:
                            logger.info("the database is back")
                        away = False
                        await self._pass_on(change)
            except ServiceError as error:
                if not away:
                    logger.warning("%s: %s", error, in_full(error.__cause__))
                away = True
                await asyncio.sleep(_AWAY_S)

    async def recall(self) -> None:
        """Every few seconds, read which workers the other services hear from, and report open calls to them."""
        while True:
            await asyncio.sleep(_RECALL_S)
            try:
                await self._workers.recall()
                await self._counts.tell()
            except ServiceError:
                logger.debug("calls cannot be exchanged with the other services now")

    async def _pass_on(self, change: Change | None) -> None:
        if change is None:
            self._ledger.broker.missed()
            self._dispatcher.wake_all()
            return
        if self._ledger.broker.watched(change.job_id):
            read = self._ledger.store.events
            for event in await self._ledger.read(read, change.job_id, after=change.sequence - 1, limit=1):
                self._ledger.broker.publish(change.job_id, event)
        if change.state is not State.RUNNING and (job := await self._ledger.read(self._store.get, change.job_id)):
            self._dispatcher.wake(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The parts that the server uses, as do tests without a network."""

    optimizer: OptimizerServicer
    blobs: BlobServicer
    workers: WorkerServicer
    dispatcher: Dispatcher
    sharing: _Sharing | None
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
        else _StoredLeases(ledger, shared, duration_s=config.lease_s)
    )
    dispatcher = Dispatcher(ledger, workers, leases, background, on_expiry=metrics.lease_expired)
    admission = Admission(blobs, config.limits, store, clock)
    holdings = Holdings(ledger, admission, kept=policy is not None)
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
        sharing = _Sharing(ledger, shared, dispatcher, workers, counts)
    equal = EqualJobs(ledger, holdings, background)
    ledger.listeners += [metrics.heard, dispatcher.heard, submit.heard, equal.heard]
    await workers.recall()
    await dispatcher.recover()
    await _recall_figures(models, ledger, _REMEMBERED_PER_LABEL * config.model_labels)
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


async def _recall_figures(models: ModelFigures, ledger: Ledger, limit: int) -> None:
    for job in reversed(await ledger.read(ledger.store.recent_answers, limit)):
        model = job.namespace, job.name
        result = await ledger.read(ledger.store.result_of, job.id)
        if result is not None:
            models.record(model, Figures.of(jobs_pb2.JobResult.FromString(result)))
        for live in (await ledger.read(ledger.store.live_of, [job.id])).values():
            models.record_live(model, jobs_pb2.LiveFigures.FromString(live))


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry
