"""Talk to the service about one question, from the first blob to the module."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import nn
from torch.fx import GraphModule

from fxlib import protocol, wire
from fxlib.client.answer_policy import limits_of_answer, screen
from fxlib.client.blobs import BLOB_CORRUPT, download, upload
from fxlib.client.connection import Connection, Deadline
from fxlib.client.preflight import UnservedError, check_served
from fxlib.client.request import Prepared
from fxlib.client.result import Result
from fxlib.client.variant_exchange import bind_variants
from fxlib.client.watch_job import Progress, follow, get_job
from fxlib.errors import FxlibError, JobFailedError, LimitError, RejectedError, RemoteError, WireError
from fxlib.reasons import Reason
from fxlib.recipes.recipes import with_variants
from fxlib.runtime import CapturedModule
from fxlib.runtime.backends import installed
from fxlib.spec.job import Blob, Job
from fxlib.spec.report import Report
from fxlib.utils import tracing
from fxlib.utils.compare import largest_error
from fxlib.utils.hardware import instructions
from fxlib.v1 import jobs_pb2

_LOG = logging.getLogger(__name__)

BLOB_MISSING: Final = "BLOB_MISSING"
"""The service's error code for a blob that a request names but that the service no longer has."""

_COMPUTED: Final = "values computed from weights: training, and whatever records gradients, goes on with the original"
"""The note of a result whose passes were given the weights."""
_MEASURE_HERE: Final = "Have a worker on a machine like this one, and name its label in `where`."

_LOST: Final = frozenset({BLOB_CORRUPT, "BLOB_NOT_FOUND"})
"""The service's error codes for a blob that was damaged or deleted after the request was accepted."""


class OtherMachineError(FxlibError):
    """The answer was measured on a processor, or with a compiler, that this machine does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A result, and the error on the way to it, if there was one."""

    result: Result
    problem: str = ""


def left_alone(original: nn.Module) -> nn.Module:
    """Return a module as it was given; if it was captured for the question, its original runs."""
    if isinstance(original, CapturedModule):
        original.keep_original()
    return original


def kept(original: nn.Module, error: Exception, *, job_id: str = "") -> Outcome:
    """Return the outcome that keeps the original because of an error."""
    text = str(error) if isinstance(error, FxlibError) else f"unexpected {type(error).__name__}: {error}"
    result = Result.original(left_alone(original), text, job_id=job_id)
    if isinstance(error, UnservedError):  # this is an answer, as a trial would give it: nothing went wrong
        return Outcome(result=replace(result, reason=error.reason))
    if isinstance(error, OtherMachineError):
        result = replace(result, reason=Reason.OTHER_MACHINE)
    return Outcome(
        result=result,
        problem=f"training goes on with the original module: {text}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The service's answer: a finished job, and its rewritten graph, if it has one to adopt.

    `values` are tensors that the graphs hold besides the caller's own, as blobs by SHA-256. `variants` are the
    rewritten graphs of variants to adopt, by name.
    """

    job: Job
    graph: bytes = b""
    variants: Mapping[str, bytes] = field(default_factory=dict)
    values: Mapping[str, bytes] = field(default_factory=dict)


def ask(
    connection: Connection, prepared: Prepared, deadline: Deadline, patience_s: float, progress: Progress
) -> Outcome:
    """Send the question, follow the job, and bind the answer to the caller's own module; raise nothing."""
    inquiry = Inquiry(connection, deadline, patience_s, progress)
    try:
        return Outcome(result=conclude(prepared, inquiry.answer(prepared), seconds=deadline.left_s))
    except Exception as error:  # noqa: BLE001 - promised: whatever happens on the way, the job trains
        return kept(prepared.captured, error, job_id=inquiry.job_id)


class Inquiry:
    """One conversation with the service, up to its answer; `job_id` is known from the moment it is accepted."""

    def __init__(self, connection: Connection, deadline: Deadline, patience_s: float, progress: Progress) -> None:
        self._connection = connection
        self._deadline = deadline
        self._patience_s = patience_s
        self._progress = progress
        self.job_id = ""

    @tracing.span("client.send")
    def hand_in(self, prepared: Prepared) -> Job:
        """Send the question, and return the job as the service accepted it.

        Raises:
            RemoteError: the service cannot be reached or refuses, or none of its workers could measure the job.
            PassError: nobody knows the recipe.
        """
        connection, deadline = self._connection, self._deadline
        self._progress.say(f"reaching {connection.address}")
        capabilities = connection.reach(deadline.within(self._patience_s))
        check_served(prepared, capabilities, connection, deadline)
        job = _accepted(connection, prepared, deadline, self._progress)
        self.job_id = job.id
        found = "a finished job answers" if job.cached else "done" if job.done else "waiting for a worker's measurement"
        _LOG.info("the service at %s took job %s: %s", connection.address, job.id, found)
        return job

    def answer(self, prepared: Prepared) -> Answer:
        """Send the question, and follow the job to its end; repeat this once if the service lost or damaged a blob.

        The service deletes a blob that it finds damaged, so that a new question uploads it again.

        Raises:
            RemoteError: the service cannot be reached, refuses, or does not answer in time, or none of its workers
                could measure the job.
            PassError: nobody knows the recipe.
            WireError: the service's messages have no meaning.
        """
        try:
            answer = self._answer_once(prepared)
            if answer.job.failure is None or answer.job.failure.code not in _LOST:
                return answer
            problem = answer.job.failure.message
        except RejectedError as error:
            if error.code not in _LOST:
                raise
            problem = str(error)
        _LOG.info("asking again, since the service has lost a blob: %s", problem)
        return self._answer_once(_anew(prepared))

    def _answer_once(self, prepared: Prepared) -> Answer:
        connection, deadline = self._connection, self._deadline
        job = self.hand_in(prepared)
        if not job.done:
            with tracing.span("client.wait"):
                job = follow(connection, job.id, deadline, self._progress.show)
        elif job.report is None:
            job = get_job(connection, job.id, deadline)
        if job.report is None:
            return Answer(job=job)
        adopts = job.report.decision == "adopt" and job.graph is not None
        limits = _limits(prepared, deadline)
        graph = b""
        if adopts and job.graph is not None:
            graph = _download(connection, job.graph, deadline, limits[""])
        variants = {
            name: _download(connection, job.variant_graphs[name], deadline, limits[name])
            for name, report in job.report.variants.items()
            if report.decision == "adopt" and name in job.variant_graphs and name in limits
        }
        graphs = [each for each in (graph, *variants.values()) if each]
        named = [ref for each in graphs for ref in map(protocol.blob_from_proto, wire.values_of(wire.parse(each)))]
        wanted = {ref.sha256: ref for ref in named}
        most = sum(each.weights_bytes for each in limits.values())
        if (size := sum(ref.size for ref in wanted.values())) > most:
            raise LimitError(f"{size:,} bytes of values exceed the limit of {most:,}", where="the answer")
        values = {sha256: download(connection, ref, deadline) for sha256, ref in wanted.items()}
        return Answer(job=job, graph=graph, variants=variants, values=values)


def _anew(prepared: Prepared) -> Prepared:
    """Return the same question as a new request, which the last one's answer does not answer."""
    request = jobs_pb2.OptimizeRequest()
    request.CopyFrom(prepared.request)
    request.request_id = str(uuid.uuid4())
    return replace(prepared, request=request)


@tracing.span("client.bind")
def conclude(prepared: Prepared, answer: Answer, *, seconds: float = math.inf) -> Result:
    """Check an answer, and bind its graph to the caller's own module.

    Args:
        prepared: the question.
        answer: the service's answer.
        seconds: the time that is left, in seconds; a graph that would take longer to check is refused unread.

    Raises:
        JobFailedError: the job ended without a report.
        OtherMachineError: this machine lacks the instructions or compilers that were measured.
        WireError: the answer contradicts itself, or this module may not become its graph.
    """
    job = answer.job
    if job.report is None:
        detail = f"{job.failure.message} ({job.failure.code})" if job.failure else "no reason given"
        raise JobFailedError(detail, where=f"job {job.id} {job.state}")
    module: nn.Module = prepared.captured
    limits = limits_of_answer(prepared.captured, prepared.request.graph.size, seconds)
    protocol.check_adoption(job.report, protocol.trial_from_proto(prepared.request.trial))
    _check_machine(job.report)
    if job.report.decision == "adopt":
        if job.graph is None:
            raise WireError("there is no graph to adopt", where=f"job {job.id}")
        module = rewritten = wire.decode(
            wire.parse(answer.graph), blobs=answer.values, root=prepared.captured, limits=limits
        )
        screen(rewritten, prepared.captured, passes=prepared.passes)
        rewritten.computed_from(prepared.marks)
    report = job.report
    if report.decision == "adopt" and prepared.marks:
        report = replace(report, notes=(*report.notes, _COMPUTED))
    if problem := _misses_bound(prepared, module):
        module, why = prepared.captured, Reason.NOT_SAME.sentence(problem)
        report = replace(report, decision="keep_original", reason=Reason.NOT_SAME, explanation=why)
    variants, reports = bind_variants(
        prepared.variants,
        report.variants,
        answer.variants,
        answer.values,
        seconds=seconds,
        passes=prepared.passes,
    )
    report = replace(report, variants={**reports, **prepared.declined})
    if report.adopts and isinstance(module, GraphModule) and isinstance(prepared.captured, CapturedModule):
        module = with_variants(prepared.captured, module, variants)
    module = module if report.adopts else left_alone(module)
    report = _blamed(report) if prepared.ran else report
    _LOG.info("job %s: %s; %s", job.id, report.decision, report.explanation)
    return Result.of(report, module=module, job_id=job.id, cached=job.cached)


def _misses_bound(prepared: Prepared, module: nn.Module) -> str:
    """Return how a module exceeds the allowed error on the batches that did not leave this process.

    A trial has seen only made-up batches. The program is known to run here only if ranges were taken from the batches.
    """
    if module is prepared.captured or not prepared.workload.ranges:
        return ""
    bound, worst = prepared.request.trial.max_relative_error, 0.0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for batch in prepared.workload.calibration:
            found, expected = (each(*batch.inputs, **batch.kwargs) for each in (module, prepared.captured))
            worst = max(worst, largest_error(found, expected))
    if worst <= bound:
        return ""
    return f"on the job's own batches it has a relative error of {worst:.3g}, and max_relative_error is {bound:g}"


def _check_machine(report: Report) -> None:
    """Check that this machine has the instructions and the compilers with which an answer to adopt was measured.

    Raises:
        OtherMachineError: it does not have them.
    """
    for each in (report, *report.variants.values()):
        if each.decision != "adopt":
            continue
        there, here = set(each.instructions), set(instructions())
        if there and (other := sorted(there ^ here)):
            where = [f"{name} {'there' if name in there else 'here'} alone" for name in other]
            problem = f"its processor is another one ({', '.join(where)})"
            raise OtherMachineError(Reason.OTHER_MACHINE.sentence(problem), hint=_MEASURE_HERE)
        for part in each.parts:
            own = installed(part.backend.partition("==")[0])
            if part.compiled and own != part.backend:
                problem = f"it compiled with {part.backend}, and this one has {own or 'none'}"
                raise OtherMachineError(Reason.OTHER_MACHINE.sentence(problem), hint=_MEASURE_HERE)


def _limits(prepared: Prepared, deadline: Deadline) -> dict[str, wire.Limits]:
    """Return how large the graphs of an answer may be, by the variant's name, "" for the main one."""
    own = {name: limits_of_answer(each.captured, each.request.graph.size) for name, each in prepared.variants.items()}
    return {"": limits_of_answer(prepared.captured, prepared.request.graph.size, deadline.left_s), **own}


def _download(connection: Connection, blob: Blob, deadline: Deadline, limits: wire.Limits) -> bytes:
    if blob.size > limits.graph_bytes:
        raise LimitError(f"a graph of {blob.size:,} bytes, and may have {limits.graph_bytes:,}", where="the answer")
    return download(connection, blob, deadline)


def _blamed(report: Report) -> Report:
    """Reword the answer if a model that ran here failed in the trial, since the model is not to blame."""
    if report.reason is not Reason.ORIGINAL_FAILS:
        return report
    detail = report.explanation.removeprefix(Reason.ORIGINAL_FAILS.sentence())
    return replace(report, reason=Reason.STAND_IN_FAILS, explanation=Reason.STAND_IN_FAILS.sentence(detail))


def _accepted(connection: Connection, prepared: Prepared, deadline: Deadline, progress: Progress) -> Job:
    """Upload missing blobs, and hand the question in; the request id makes it safe to repeat."""
    progress.say("sending the graph")
    prepared.request.traceparent = tracing.traceparent()
    upload(connection, prepared.blobs, deadline)
    for _ in prepared.blobs:
        try:
            return _optimize(connection, prepared.request, deadline)
        except RejectedError as error:
            if error.code != BLOB_MISSING:
                raise
        upload(connection, prepared.blobs, deadline)  # it was deleted between the two calls, or found damaged
    return _optimize(connection, prepared.request, deadline)


def _optimize(connection: Connection, request: jobs_pb2.OptimizeRequest, deadline: Deadline) -> Job:
    answer = connection.call(
        "asking for an optimization", lambda left_s: connection.jobs.Optimize(request, timeout=left_s), deadline
    )
    if dict(answer.job.where) != dict(request.where):
        connection.call("cancelling the job", lambda left_s: _cancel(connection, answer.job.id, left_s), deadline)
        raise RemoteError(
            f"the service at {connection.address} is of an earlier release: it would measure the job on any worker",
            where="where",
            hint="Update the service, or leave `where` out.",
        )
    return protocol.job_from_proto(answer.job)


def _cancel(connection: Connection, job_id: str, left_s: float) -> None:
    connection.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job_id), timeout=left_s)
