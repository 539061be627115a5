"""The figures of models as the store has them: from before a restart, and from other services that share the store."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from fxlib.spec.job import JobFilter
from fxlib.v1 import jobs_pb2
from fxlib_service.errors import ServiceError
from fxlib_service.ledger import Ledger
from fxlib_service.metrics import Figures, ModelFigures

_RECALL_S: Final = 5.0

logger = logging.getLogger(__name__)


class StoredFigures:
    """Reads the latest answers and live reports into `ModelFigures`; each time, those that are new.

    Args:
        models: the figures of models.
        ledger: gives access to the store.
        limit: number of jobs that are read, the latest ones.
    """

    def __init__(self, models: ModelFigures, ledger: Ledger, *, limit: int) -> None:
        self._models = models
        self._ledger = ledger
        self._limit = limit
        self._answers = set[str]()
        """The ids of the jobs whose answers were read last time."""
        self._reports = dict[str, bytes]()
        """The live reports that were read last time, by job."""

    async def recall(self) -> None:
        """Record what is new in the store, unless something later of the same model is known.

        Raises:
            ServiceError: STORAGE_UNAVAILABLE.
        """
        store, read = self._ledger.store, self._ledger.read
        known = self._models.answered_by()
        measured = await read(store.recent_answers, self._limit)
        turn = {job.id: number for number, job in enumerate(reversed(measured))}
        for job in reversed(measured):
            model = job.namespace, job.name
            before = known.get(model, "")
            if job.id in self._answers or turn[job.id] <= turn.get(before, -1):
                continue
            result = await read(store.result_of, job.id)
            if result is None or self._models.answered_by().get(model, "") != before:  # this service took one since
                continue
            self._models.record(model, Figures.of(jobs_pb2.JobResult.FromString(result), job_id=job.id))
            known[model] = job.id
        self._answers = {job.id for job in measured}
        # A launcher may train with an answer from the cache as well.
        answered, _ = await read(store.page, JobFilter(states=("succeeded",)), beyond=None, limit=self._limit)
        jobs = {job.id: job for job in (*measured, *answered)}
        stored = await read(store.live_of, list(jobs))
        reports = [
            (jobs[job_id], jobs_pb2.LiveFigures.FromString(live))
            for job_id, live in stored.items()
            if self._reports.get(job_id) != live
        ]
        for job, live in sorted(reports, key=lambda report: report[1].at.ToNanoseconds()):
            model = job.namespace, job.name
            if live.at.ToNanoseconds() > self._models.reported_at(model):
                self._models.record_live(model, live)
        self._reports = dict(stored)

    async def follow(self) -> None:
        """Every few seconds, recall what other services have stored, until this task is cancelled."""
        while True:
            await asyncio.sleep(_RECALL_S)
            try:
                await self.recall()
            except ServiceError:
                logger.debug("the figures of models cannot be read now")
