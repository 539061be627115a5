"""OptimizerService: takes jobs, and returns their histories and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from typing_extensions import override

from fxlib import __version__
from fxlib.protocol import catalogue_to_proto
from fxlib.spec.job import JobFilter
from fxlib.utils import tracing
from fxlib.v1 import jobs_pb2, jobs_pb2_grpc
from fxlib_service.clock import Clock
from fxlib_service.config import Limits
from fxlib_service.convert import event_message, filter_from_proto, job_line, job_message, worker_to_proto
from fxlib_service.errors import Code, ServiceError
from fxlib_service.events import EventBroker, Subscription
from fxlib_service.field_checks import check_listing, check_live
from fxlib_service.job import Event, Job, State
from fxlib_service.ledger import Ledger, job_not_found
from fxlib_service.lifecycle import Cancelled
from fxlib_service.quotas import Quotas
from fxlib_service.servicers.context import Context, caller_of, note
from fxlib_service.submit import Submit
from fxlib_service.workers import Workers

_PAGE: Final = 50
_MAX_PAGE: Final = 500
_EVENTS_PAGE: Final = 500
_RESULTS_AT_ONCE: Final = 20
"""Number of jobs of a page whose answers are in memory at the same time. Each may have megabytes, for a line of it."""


class OptimizerServicer(jobs_pb2_grpc.OptimizerServiceServicer):
    """Implements OptimizerService, which launchers call."""

    def __init__(
        self,
        ledger: Ledger,
        broker: EventBroker,
        submit: Submit,
        workers: Workers,
        limits: Limits,
        *,
        quotas: Quotas,
        clock: Clock,
        on_live: Callable[[tuple[str, str], jobs_pb2.LiveFigures, bool], None],
    ) -> None:
        self._catalogue = catalogue_to_proto()  # only once, since it reads the source of every pass
        self._ledger = ledger
        self._broker = broker
        self._submit = submit
        self._workers = workers
        self._limits = limits
        self._quotas = quotas
        self._clock = clock
        self._on_live = on_live

    @override
    async def Optimize(self, request: jobs_pb2.OptimizeRequest, context: Context) -> jobs_pb2.OptimizeResponse:
        """Accept a job, or return the one that has the request's id."""
        job, answer = await self._submit.accept(request, caller_of(context), peer=context.peer if context else "")
        tracing.note(job_id=job.id, model=job.name, namespace=job.namespace, cached=job.cached)
        note(context, job, cached=job.cached)
        message = job_message(job, answer) if answer is not None else await self._with_result(job)
        return jobs_pb2.OptimizeResponse(job=message)

    @override
    async def GetJob(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.GetJobResponse:
        """Return a job, with its answer."""
        return jobs_pb2.GetJobResponse(job=await self._with_result(await self._seen(request.job_id, context)))

    @override
    async def WatchJob(
        self, request: jobs_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.WatchJobResponse]:
        """Stream a job's history as it happens."""
        await self._seen(request.job_id, context)
        async for event in _watch(self._ledger, self._broker, request.job_id, after=request.after_sequence):
            yield jobs_pb2.WatchJobResponse(event=event_message(event))

    @override
    async def ListJobs(self, request: jobs_pb2.ListJobsRequest, context: Context) -> jobs_pb2.ListJobsResponse:
        """List jobs, page by page."""
        check_listing(request)
        wanted = filter_from_proto(request)
        return await self._ledger.read(
            self._page,
            replace(wanted, namespace=caller_of(context).namespace_asked(wanted.namespace)),
            beyond=int(request.page_token) if request.page_token else None,
            limit=min(request.page_size or _PAGE, _MAX_PAGE),
            oldest_first=request.oldest_first,
        )

    @override
    async def CancelJob(self, request: jobs_pb2.CancelJobRequest, context: Context) -> jobs_pb2.CancelJobResponse:
        """Cancel a job. A job that has ended stays as it is."""
        await self._seen(request.job_id, context)
        transition = await self._ledger.apply(request.job_id, Cancelled())
        note(context, transition.job)
        return jobs_pb2.CancelJobResponse(job=await self._with_result(transition.job))

    @override
    async def RetryJob(self, request: jobs_pb2.RetryJobRequest, context: Context) -> jobs_pb2.RetryJobResponse:
        """Make a new job from the request of an earlier one."""
        await self._seen(request.job_id, context)
        try:
            stored = await self._ledger.read(self._ledger.store.request_of, request.job_id)
        except KeyError:  # deleted in the meantime
            raise job_not_found(request.job_id) from None
        asked = jobs_pb2.OptimizeRequest.FromString(stored)
        asked.request_id, asked.fresh, asked.traceparent = request.request_id, True, ""
        job, _ = await self._submit.accept(asked, caller_of(context), peer=context.peer if context else "")
        note(context, job, new_job=job.id)
        return jobs_pb2.RetryJobResponse(job=await self._with_result(job))

    @override
    async def ReportLive(self, request: jobs_pb2.ReportLiveRequest, context: Context) -> jobs_pb2.ReportLiveResponse:
        """Store a launcher's measurements of its own steps in place of its earlier ones."""
        check_live(request.live)
        caller = caller_of(context)
        await self._quotas.live_report(caller.namespace, caller.tenant, self._limits)
        live = jobs_pb2.LiveFigures()
        live.CopyFrom(request.live)
        live.at.FromMicroseconds(round(self._clock.now() * 1e6))
        job = await self._seen(request.job_id, context)
        observed = await self._ledger.observe(
            job.id, live.SerializeToString(), went_back=_why_back(live) if live.went_back else ""
        )
        self._on_live((job.namespace, job.name), live, observed.event is not None)
        return jobs_pb2.ReportLiveResponse()

    @override
    async def GetCapabilities(
        self, request: jobs_pb2.GetCapabilitiesRequest, context: Context
    ) -> jobs_pb2.GetCapabilitiesResponse:
        """Return what the service and its live workers can do."""
        workers = self._workers.live()
        return jobs_pb2.GetCapabilitiesResponse(
            fxlib_version=__version__,
            torch_versions=sorted({worker.torch_version for worker in workers}),
            workers=[worker_to_proto(worker) for worker in workers],
            recipes=[recipe.name for recipe in self._catalogue.recipes],
            max_blob_bytes=self._limits.blob_bytes,
            max_graph_nodes=self._limits.graph_nodes,
        )

    @override
    async def ListPasses(self, request: jobs_pb2.ListPassesRequest, context: Context) -> jobs_pb2.ListPassesResponse:
        """Return the passes and the recipes."""
        return self._catalogue

    async def _seen(self, job_id: str, context: Context) -> Job:
        """Return a job that the caller may see.

        Raises:
            ServiceError: JOB_NOT_FOUND, also for a job of another namespace, whose existence stays hidden.
        """
        job = await self._ledger.get(job_id)
        if not caller_of(context).sees(job.namespace):
            raise job_not_found(job_id)
        return job

    def _page(
        self, wanted: JobFilter, *, beyond: int | None, limit: int, oldest_first: bool
    ) -> jobs_pb2.ListJobsResponse:
        store = self._ledger.store
        jobs, following = store.page(wanted, beyond=beyond, limit=limit, oldest_first=oldest_first)
        page = jobs_pb2.ListJobsResponse(next_page_token="" if following is None else str(following))
        for at in range(0, len(jobs), _RESULTS_AT_ONCE):
            some = jobs[at : at + _RESULTS_AT_ONCE]
            answered = [job.id for job in some if job.state is State.SUCCEEDED]
            results, live = store.results_of(answered), store.live_of(answered)
            page.jobs.extend(self._waiting(job_line(job, results.get(job.id), live.get(job.id)), job) for job in some)
        return page

    async def _with_result(self, job: Job) -> jobs_pb2.Job:
        if job.state is not State.SUCCEEDED:
            return self._waiting(job_message(job), job)
        result, live = await self._ledger.read(self._stored_of, job.id)
        return job_message(job, result, live)

    def _waiting(self, message: jobs_pb2.Job, job: Job) -> jobs_pb2.Job:
        """Add to a job's message what the job waits for, if it is queued and no live worker could take it."""
        if job.state is State.QUEUED:
            message.waits_for = self._workers.missing(job.torch_version, job.where)
        return message

    def _stored_of(self, job_id: str) -> tuple[bytes | None, bytes | None]:
        store = self._ledger.store
        return store.result_of(job_id), store.live_of([job_id]).get(job_id)


def _why_back(live: jobs_pb2.LiveFigures) -> str:
    gain = live.gain
    seen = f": {gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]" if live.HasField("gain") else ""
    return f"after {live.steps:,} steps, the launcher went back to its original: the gain fell below its promise{seen}"


async def _watch(ledger: Ledger, broker: EventBroker, job_id: str, *, after: int) -> AsyncIterator[Event]:
    """Yield the stored events with a sequence number above `after`, then new ones, up to the one that ends the job.

    Raises:
        ServiceError: JOB_NOT_FOUND; SEQUENCE_AHEAD; SHUTTING_DOWN, after which watching can be resumed.
    """
    job = await ledger.get(job_id)
    if after > job.last_sequence:
        raise ServiceError(Code.SEQUENCE_AHEAD, f"job {job_id} has {job.last_sequence} events, not {after}")
    if job.state.finished and after == job.last_sequence:
        return
    last = job.last_sequence if job.state.finished else 0  # a launcher may have reported after the end
    with broker.subscribe(job_id) as subscription:
        while True:
            if broker.closed:
                raise ServiceError(
                    Code.SHUTTING_DOWN, "the service is shutting down; watch the job again", retry_after_s=1.0
                )
            async with aclosing(_stored_then_live(ledger, subscription, job_id, after)) as events:
                async for event in events:
                    after = event.sequence
                    yield event
                    if event.state.finished and event.sequence >= last:
                        return


async def _stored_then_live(
    ledger: Ledger, subscription: Subscription, job_id: str, after: int
) -> AsyncGenerator[Event]:
    """Yield the stored events, then new ones, until the subscription has missed one.

    Raises:
        ServiceError: JOB_NOT_FOUND.
    """
    full = True
    while full:
        page = await ledger.read(ledger.store.events, job_id, after=after, limit=_EVENTS_PAGE)
        if not page:
            await ledger.get(job_id)  # raises if the job was deleted in the meantime, with its events
        full = len(page) == _EVENTS_PAGE
        for event in page:
            after = event.sequence
            yield event
    while (live := await subscription.next()) is not None and live.sequence <= after + 1:
        if live.sequence == after + 1:
            after = live.sequence
            yield live
