"""WorkerService: claims of jobs, heartbeats, progress reports and results."""

from __future__ import annotations

import math
from typing import Final

from typing_extensions import override

from fxlib.reasons import Reason
from fxlib.spec.job import JobFailure
from fxlib.utils import tracing
from fxlib.v1 import jobs_pb2, workers_pb2, workers_pb2_grpc
from fxlib_service.admission import Admission
from fxlib_service.config import Limits
from fxlib_service.convert import worker_from_proto
from fxlib_service.dispatch import Dispatcher, Grant
from fxlib_service.errors import invalid
from fxlib_service.field_checks import check_failure, check_reason, check_report, check_worker, clip
from fxlib_service.holdings import Holdings
from fxlib_service.lifecycle import Completed, Failed, Released, Reported
from fxlib_service.roles import Caller
from fxlib_service.servicers.context import Context, caller_of, note, seconds_left

_MARGIN_S: Final = 0.5
"""Seconds before the caller's deadline at which an empty answer is sent."""

_LASTING: Final = frozenset(
    {
        Reason.FASTER,
        Reason.NOT_FASTER,
        Reason.BUDGET_EXHAUSTED,
        Reason.NO_CALLS,
        Reason.NOTHING_CHANGED,
        Reason.NOTHING_TO_GAIN,
        Reason.NOT_SAME,
        Reason.OPAQUE_CODE,
        Reason.NO_DEVICE,
        Reason.COLLECTIVES,
    }
)
"""The reasons that depend only on the request, so that equal requests may get the answer. Any other reason may depend
on the moment or on the operator's settings, and an equal request is tried anew."""

_LASTING_CODES: Final = frozenset(reason.name for reason in _LASTING)


class WorkerServicer(workers_pb2_grpc.WorkerServiceServicer):
    """Implements WorkerService, which workers call."""

    def __init__(self, dispatcher: Dispatcher, admission: Admission, holdings: Holdings, limits: Limits) -> None:
        self._dispatcher = dispatcher
        self._holdings = holdings
        self._admission = admission
        self._limits = limits

    @override
    async def Claim(self, request: workers_pb2.ClaimRequest, context: Context) -> workers_pb2.ClaimResponse:
        """Lease a job to a worker, waiting until there is one."""
        check_worker(request.worker)
        if not (math.isfinite(request.wait_s) and request.wait_s >= 0):
            raise invalid("wait_s", "must be finite and not negative")
        wait_s = min(request.wait_s, seconds_left(context, self._limits.claim_wait_s + _MARGIN_S) - _MARGIN_S)
        asking = worker_from_proto(request.worker)
        grant = await self._dispatcher.claim(asking, wait_s=wait_s, principal=caller_of(context).name)
        return workers_pb2.ClaimResponse(lease=None if grant is None else self._lease(grant))

    @override
    async def Heartbeat(self, request: workers_pb2.HeartbeatRequest, context: Context) -> workers_pb2.HeartbeatResponse:
        """Keep a lease alive."""
        await self._dispatcher.check_holder(request.job_id, caller_of(context).name)
        alive = await self._dispatcher.heartbeat(request.job_id, request.token)
        return workers_pb2.HeartbeatResponse(cancelled=not alive, duration_s=self._dispatcher.leases.duration_s)

    @override
    async def Report(self, request: workers_pb2.ReportRequest, context: Context) -> workers_pb2.ReportResponse:
        """Add a progress event to the job's history."""
        await self._dispatcher.check_holder(request.job_id, caller_of(context).name)
        check_report(request.phase, request.progress)
        report = Reported(
            token=request.token, phase=request.phase, message=clip(request.message), progress=request.progress
        )
        await self._dispatcher.tell(request.job_id, report)
        return workers_pb2.ReportResponse()

    @override
    async def Complete(self, request: workers_pb2.CompleteRequest, context: Context) -> workers_pb2.CompleteResponse:
        """End the job with an answer, or with the failure that prevented one."""
        await self._dispatcher.check_holder(request.job_id, caller_of(context).name)
        match request.WhichOneof("outcome"):
            case "result":
                for each in _answers(request.result):
                    check_reason(each.reason_code)
                    each.reason = clip(each.reason)
                result = request.result.SerializeToString(deterministic=True)
                await self._check_result(request, result, caller_of(context))
                said = Completed(
                    token=request.token,
                    result=result,
                    message=clip(_summary(request.result)),
                    reusable=all(each.reason_code in _LASTING_CODES for each in _answers(request.result)),
                )
                note(context, await self._dispatcher.complete(request.job_id, said), **_figures(request.result))
            case "failure":
                check_failure(request.failure.code)
                failure = JobFailure(code=request.failure.code, message=clip(request.failure.message))
                transition = await self._dispatcher.tell(request.job_id, Failed(token=request.token, failure=failure))
                note(context, transition.job, outcome="failed", reason=failure.code)
            case _:
                raise invalid("outcome", "must be a result or a failure")
        return workers_pb2.CompleteResponse()

    @override
    async def Release(self, request: workers_pb2.ReleaseRequest, context: Context) -> workers_pb2.ReleaseResponse:
        """Put the job back into the queue."""
        await self._dispatcher.check_holder(request.job_id, caller_of(context).name)
        await self._dispatcher.tell(request.job_id, Released(token=request.token))
        return workers_pb2.ReleaseResponse()

    def _lease(self, grant: Grant) -> workers_pb2.Lease:
        request = jobs_pb2.OptimizeRequest()
        request.ParseFromString(grant.request)
        job = grant.job
        if request.traceparent and job.just_began:
            waited = tracing.begin(
                "service.queued", request.traceparent, at_s=job.created_at, job_id=job.id, attempt=job.attempts
            )
            waited.end(job.started_at)
        return workers_pb2.Lease(
            job_id=job.id,
            token=job.token,
            duration_s=self._dispatcher.leases.duration_s,
            request=request,
            attempt=job.attempts,
        )

    async def _check_result(self, request: workers_pb2.CompleteRequest, data: bytes, caller: Caller) -> None:
        """Check an answer, and that it comes under the job's lease; only then does its namespace get the graphs."""
        asked = jobs_pb2.OptimizeRequest.FromString(await self._dispatcher.request_of(request.job_id, request.token))
        result = request.result
        await self._admission.check_result(data, asked.trial.SerializeToString(), caller)
        if (names := [each.name for each in result.variants]) != [each.name for each in asked.variants]:
            raise invalid("result.variants", f"must be those of the request, and are {', '.join(names) or 'none'}")
        for index, each in enumerate(_answers(result)):
            field = f"result.variants[{index - 1}].result.graph" if index else "result.graph"
            if each.HasField("graph"):
                await self._admission.check_graph(each.graph, field)
            elif each.decision == jobs_pb2.DECISION_ADOPT:
                raise invalid(field, "must be set, since the result adopts it")
        await self._holdings.give(asked.namespace, result)


def _answers(result: jobs_pb2.JobResult) -> list[jobs_pb2.JobResult]:
    """Return the results for the job's own graph and for each variant."""
    return [result, *(each.result for each in result.variants)]


def _figures(result: jobs_pb2.JobResult) -> dict[str, object]:
    """Return the figures of an answer for the audit log; gains are relative, as measured."""
    outcome = "adopt" if result.decision == jobs_pb2.DECISION_ADOPT else "keep_original"
    gain = {"gain": result.gain.value, "gain_low": result.gain.low, "gain_high": result.gain.high}
    return {"outcome": outcome, "reason": result.reason_code, **(gain if result.HasField("gain") else {})}


def _summary(result: jobs_pb2.JobResult) -> str:
    return "; ".join([_decided(result), *(f"{each.name}: {_decided(each.result)}" for each in result.variants)])


def _decided(result: jobs_pb2.JobResult) -> str:
    if result.decision == jobs_pb2.DECISION_ADOPT:
        gain = result.gain
        return f"adopt: {gain.value:+.1%} QPS ({gain.low:+.1%} to {gain.high:+.1%})"
    return f"keep the original: {result.reason}"
