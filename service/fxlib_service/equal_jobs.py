"""Ends queued jobs in the same way as an equal job that a worker has ended."""

from __future__ import annotations

import logging
from typing import Final

from fxlib.v1 import jobs_pb2
from fxlib_service.background import Background
from fxlib_service.errors import LOST, ServiceError
from fxlib_service.holdings import Holdings
from fxlib_service.job import Job, State
from fxlib_service.ledger import Ledger
from fxlib_service.lifecycle import Answered, Transition
from fxlib_service.stores.base import Head

_LOST_CODES: Final = frozenset(code.name for code in LOST)

logger = logging.getLogger(__name__)


class EqualJobs:
    """Ends queued jobs in the same way as an equal job that a worker has just ended.

    They were submitted at the same time, perhaps by the ranks of one launch. Working on each of them would give the
    same answer again, or hang or crash one worker after another.
    """

    def __init__(self, ledger: Ledger, holdings: Holdings, background: Background) -> None:
        self._ledger = ledger
        self._holdings = holdings
        self._background = background

    def heard(self, transition: Transition) -> None:
        """End the queued duplicates of a job that a worker has ended."""
        job = transition.job
        if job.state in (State.SUCCEEDED, State.FAILED) and not job.cached and not _lost_a_blob(job):
            self._background.entrust(self._end(job.cache_key, _answer_of(job, transition.result)), "ending equal jobs")

    async def have_ended(self, waiting: Head) -> bool:
        """End a queued job, and return True, if an equal one has ended since it came.

        Whoever is about to work on a job asks this first: the equal job may have ended a moment ago, or at another
        service that was killed before it ended the others.
        """
        ended, result = await self._ledger.read(self._ended, waiting.job_id)
        if ended is None:
            return False
        return await self._give(waiting.job_id, waiting.namespace, _answer_of(ended, result))

    def _ended(self, job_id: str) -> tuple[Job | None, bytes | None]:
        store = self._ledger.store
        ended = store.ended_equal(job_id)
        if ended is None or _lost_a_blob(ended):
            return None, None
        result = store.result_of(ended.id) if ended.state is State.SUCCEEDED else None
        return (None, None) if ended.state is State.SUCCEEDED and result is None else (ended, result)

    async def _end(self, cache_key: str, answer: Answered) -> None:
        for duplicate in await self._ledger.read(self._ledger.store.duplicates, cache_key):
            await self._give(duplicate.id, duplicate.namespace, answer)

    async def _give(self, job_id: str, namespace: str, answer: Answered) -> bool:
        """End a queued job with an answer, and return True, unless the answer's graphs were lost since."""
        if answer.result is not None:
            try:
                await self._holdings.give(namespace, jobs_pb2.JobResult.FromString(answer.result))
            except ServiceError as error:
                if error.code not in LOST:
                    raise
                logger.warning("job %s does not get the answer of job %s: %s", job_id, answer.job_id, error)
                return False
        return (await self._ledger.apply(job_id, answer)).event is not None


def _lost_a_blob(job: Job) -> bool:
    """Return whether a job has failed for want of a blob, which an equal job may have restored."""
    return job.failure is not None and job.failure.code in _LOST_CODES


def _answer_of(job: Job, result: bytes | None) -> Answered:
    return Answered(job_id=job.id, result=result, failure=job.failure, measured_by=job.measured_by)
