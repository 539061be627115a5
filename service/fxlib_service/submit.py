"""Turns a request into its job: an earlier one, one answered from the cache, or a newly queued one."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from fxlib.utils import tracing
from fxlib.v1 import jobs_pb2
from fxlib_service.admission import Admission, Examined, is_small
from fxlib_service.config import Limits
from fxlib_service.errors import Code, ServiceError
from fxlib_service.fair_budget import FairBudget
from fxlib_service.field_checks import DEFAULT_NAMESPACE
from fxlib_service.holdings import Holdings
from fxlib_service.job import Job
from fxlib_service.ledger import Ledger
from fxlib_service.lifecycle import Answered, Transition, decide, submit
from fxlib_service.policy import Policy
from fxlib_service.quotas import Quotas
from fxlib_service.reserve import Reserve
from fxlib_service.roles import Caller
from fxlib_service.stores.base import QueueFullError
from fxlib_service.workers import Workers

_RETRY_AFTER_S: Final = 10.0
_REMEMBERED: Final = 512
_SMALL_BYTES: Final = 64 << 10
_WHOLE_S: Final = 1.0
"""Seconds for which an answer that was found complete is given to equal requests without checking again that the
database has the answer and the namespace's blobs, and that the disk has the blobs. A blob could just as well be damaged
a second after a check, and its reader would find out. Jobs themselves are not affected: they are durable before each
answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """An answer that the cache has given: its bytes and the blobs that it names, with the graphs listed separately."""

    result: bytes
    blobs: Mapping[str, int]
    graphs: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """An answer that was found complete for a request, on one of these kinds of hardware, until a time in seconds."""

    answer: Answered
    examined: Examined
    hardware: frozenset[str]
    until_s: float


class Submit:
    """Accepts requests.

    Args:
        ledger: stores the jobs.
        admission: checks requests.
        holdings: records which namespace a cached answer goes to.
        workers: the known workers; their hardware decides which cached answers apply.
        turns: limits how many requests are answered from the cache at once, in turn with other calls.
        limits: limits on queued jobs and on trials.
        policy: says whether namespaces share answers, and what each may ask for. With None, they share, and have no
            quotas.
        reserve: room on the disk that new jobs may not use.
    """

    def __init__(
        self,
        ledger: Ledger,
        admission: Admission,
        holdings: Holdings,
        workers: Workers,
        *,
        turns: FairBudget,
        limits: Limits,
        policy: Policy | None,
        reserve: Reserve | None = None,
    ) -> None:
        self._ledger = ledger
        self._admission = admission
        self._holdings = holdings
        self._policy = policy
        self._quotas = Quotas() if policy is None else policy.quotas
        self._workers = workers
        self._turns = turns
        self._limits = limits
        self._reserve = reserve
        self._given: OrderedDict[str, _Given] = OrderedDict()
        self._whole: OrderedDict[tuple[str, str, str | None], _Whole] = OrderedDict()

    def heard(self, transition: Transition) -> None:
        """Forget the answers found so far when there is a new one, so that equal requests get it."""
        if transition.result is not None and not transition.job.cached:
            self._whole.clear()

    async def accept(
        self, received: jobs_pb2.OptimizeRequest, caller: Caller, *, peer: str = ""
    ) -> tuple[Job, bytes | None]:
        """Store a caller's request durably as a job, and return the job, with its answer if that was cached.

        Raises:
            ServiceError: PERMISSION_DENIED, INVALID_REQUEST, INVALID_GRAPH, BLOB_MISSING, REQUEST_ID_REUSED,
                QUEUE_FULL, STORAGE_FULL.
        """
        request = jobs_pb2.OptimizeRequest()
        request.CopyFrom(received)  # a copy, since defaults are filled in below
        request.namespace = caller.namespace_asked(request.namespace, otherwise=DEFAULT_NAMESPACE)
        request.ClearField("traceparent")  # it is not part of what is asked for
        digest = self._admission.identify(request)
        request.traceparent = tracing.traceparent() or tracing.valid(received.traceparent)
        async with self._turns.hold(caller.tenant, 1):
            known, answer = await self._accept_again(request, digest, caller, peer)
        if known is None:
            known = await self._ledger.read(self._ledger.store.find, request.namespace, request.request_id)
        if known is None:
            if self._reserve is not None:
                await asyncio.to_thread(self._reserve.check)
            self._quotas.check_trial(request, self._limits)
            job = self._scoped(await self._admission.examine(request, digest, caller), caller, peer)
            found = None if job.fresh else await self._answer_to(job)
            known, answer = await self._enter(job, request, found)
        if known.request_digest != digest:
            message = (
                f"request id {request.request_id} belongs to job {known.id}, which was asked for with other content"
            )
            raise ServiceError(Code.REQUEST_ID_REUSED, message, metadata={"job_id": known.id})
        return known, answer

    async def _accept_again(
        self, request: jobs_pb2.OptimizeRequest, digest: str, caller: Caller, peer: str
    ) -> tuple[Job | None, bytes | None]:
        """Do what `accept` does if an equal request was found valid and answered before; otherwise return None.

        One query of the store finds out whether all of that still holds, and one write stores the job. If anything does
        not hold, `accept` checks it in full and refuses the request.
        """
        if request.fresh or (examined := self._admission.recalled(request)) is None:
            return None, None
        try:
            self._quotas.check_trial(request, self._limits)
        except ServiceError:
            return None, None
        job = self._scoped(self._admission.job(request, digest, examined.key), caller, peer)
        answer = await self._whole_answer(job, examined, caller)
        if answer is None:
            return None, None
        request.trial.ParseFromString(examined.trial)
        return await self._enter(job, request, answer)

    async def _whole_answer(self, job: Job, examined: Examined, caller: Caller) -> Answered | None:
        """Return the answer to a job if it was given before, and nothing was missing at most a second ago."""
        hardware = frozenset(self._workers.hardware(job.torch_version, job.where))
        asked, now_s = (job.cache_key, job.namespace, caller.namespace), time.monotonic()
        seen, room = self._whole.get(asked), self._reserve is None or self._reserve.whole
        if seen and seen.examined is examined and seen.hardware == hardware and now_s < seen.until_s and room:
            return seen.answer
        answer = await self._ledger.read(self._answer_again, job, examined, caller, hardware)
        if answer is not None:
            until_s = now_s + _WHOLE_S
            self._whole[asked] = _Whole(answer=answer, examined=examined, hardware=hardware, until_s=until_s)
            self._whole.move_to_end(asked)
            while len(self._whole) > _REMEMBERED:
                self._whole.popitem(last=False)
        return answer

    def _answer_again(self, job: Job, examined: Examined, caller: Caller, hardware: frozenset[str]) -> Answered | None:
        """Return the answer to a job if it was given before and nothing is missing; blocks."""
        if self._reserve is not None and not self._reserve.refill():
            return None
        store = self._ledger.store
        found = store.answer(job.cache_key, hardware)
        given = self._given.get(found.id) if found is not None else None
        if found is None or given is None:
            return None
        needed = {*examined.blobs} if caller.namespace is not None else set[str]()
        needed |= given.blobs.keys() if self._holdings.kept else set()
        if needed and store.held(job.namespace, needed) != needed:
            return None
        if not self._admission.intact({**examined.blobs, **given.blobs}, examined.graphs | given.graphs):
            return None
        return Answered(job_id=found.id, result=given.result, measured_by=found.measured_by)

    def _scoped(self, job: Job, caller: Caller, peer: str) -> Job:
        """Return a job as this caller's, with a cache key that other namespaces share only if the policy says so."""
        shared = self._policy is None or self._policy.share_results
        key = job.cache_key if shared else _scoped(job.cache_key, job.namespace)
        return replace(job, cache_key=key, asked_by=caller.name, asked_from=peer)

    async def _enter(
        self, job: Job, request: jobs_pb2.OptimizeRequest, answer: Answered | None
    ) -> tuple[Job, bytes | None]:
        now = job.created_at
        entry = submit(job, message=self._first_message(job)) if answer is None else decide(job, answer, now)
        queue_limit = self._quotas.queued(job.namespace, self._limits)
        try:
            entered = await self._ledger.submit(entry, request.SerializeToString(), queue_limit=queue_limit)
        except QueueFullError:
            raise ServiceError(
                Code.QUEUE_FULL,
                f"namespace {job.namespace!r} has {queue_limit} queued jobs",
                metadata={"namespace": job.namespace},
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        return entered, entry.result if entered.id == job.id else None

    async def _answer_to(self, job: Job) -> Answered | None:
        found, result = await self._ledger.read(self._stored_answer, job)
        if found is None or result is None:
            return None
        answer = jobs_pb2.JobResult.FromString(result)
        for each in (answer, *(variant.result for variant in answer.variants)):
            if each.HasField("graph") and not await self._admission.still_there(each.graph, job.namespace):
                return None
        await self._holdings.give(job.namespace, answer)
        await self._remember(found.id, result, answer, job.namespace)
        return Answered(job_id=found.id, result=result, measured_by=found.measured_by)

    async def _remember(self, job_id: str, result: bytes, answer: jobs_pb2.JobResult, tenant: str) -> None:
        blobs = await self._admission.blobs_of_answer(answer, tenant)
        every = (answer, *(variant.result for variant in answer.variants))
        graphs = frozenset(each.graph.sha256 for each in every if each.HasField("graph"))
        if len(result) > _SMALL_BYTES or not is_small(blobs, graphs):
            return
        self._given[job_id] = _Given(result=result, blobs=blobs, graphs=graphs)
        while len(self._given) > _REMEMBERED:
            self._given.popitem(last=False)

    def _stored_answer(self, job: Job) -> tuple[Job | None, bytes | None]:
        store = self._ledger.store
        found = store.answer(job.cache_key, self._workers.hardware(job.torch_version, job.where))
        return found, store.result_of(found.id) if found else None

    def _first_message(self, job: Job) -> str:
        missing = self._workers.missing(job.torch_version, job.where)
        return f"queued; {missing}" if missing else "queued"


def _scoped(cache_key: str, namespace: str) -> str:
    """Return a cache key that only requests of this namespace share."""
    return hashlib.sha256(f"{namespace}\0{cache_key}".encode()).hexdigest()
