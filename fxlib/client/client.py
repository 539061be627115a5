"""Ask the service for a faster module, and train with the original if none comes: the launcher's side."""

from __future__ import annotations

import copy
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import rpc
from typing_extensions import Unpack

from fxlib.capture.coerce import Model, as_module
from fxlib.client.connection import Connection, Deadline
from fxlib.client.credentials import Tls
from fxlib.client.discovery import Discovery
from fxlib.client.group_consensus import Group, Rendezvous, Turn, ask_together, withdraw
from fxlib.client.handle import Handle
from fxlib.client.live_watch import StepWatch
from fxlib.client.preflight import UnservedError, check_measurable, run_sample
from fxlib.client.request import Prepared, Question, RequestOptions, captured_of, prepare
from fxlib.client.result import Result, WatchOptions
from fxlib.client.session import Inquiry, Outcome, ask, kept, left_alone
from fxlib.client.watch_job import Progress, Silent, display, follow, get_job
from fxlib.config import DISABLE, TORCH_VERSIONS, disabled, service_address
from fxlib.errors import CaptureError, CredentialError, FxlibError, FxlibWarning, WorkloadError
from fxlib.protocol import filter_to_proto, job_from_proto, live_to_proto
from fxlib.runtime import CapturedModule
from fxlib.runtime.gradients.plain_forward import train_as_written
from fxlib.spec.job import Event, Job, JobFilter, JobPage, State
from fxlib.spec.report import LiveFigures
from fxlib.spec.workload import Workload
from fxlib.utils import tracing
from fxlib.utils.local_service import is_token
from fxlib.v1 import jobs_pb2

_PAGE = 200
_REPORT_S = 10.0
"""Time limit of one report of live figures, in seconds."""


def connect(
    address: str | None = None,
    *,
    tls: Tls | bool = False,
    token_file: Path | str | None = None,
    insecure: bool = False,
    patience_s: float = 5.0,
) -> Client:
    """Return a client of the service at `address`; nothing is sent before it is first used.

    Args:
        address: "host:port". None: the value of FXLIB_SERVICE, else "localhost:8470".
        tls: True for TLS with the system's authorities, or a `Tls` with your own files.
        token_file: the file of the token that the service asks for. None: the value of FXLIB_TOKEN_FILE; without that,
            this user's own service on this machine is reached on its socket, or with the token that it left for its
            user.
        insecure: whether the token may be sent unencrypted to another machine.
        patience_s: how long to try to reach the service, in seconds, before the original module is kept.

    Raises:
        OSError: a file of `tls` cannot be read.
    """
    return Client(
        address or service_address(),
        tls=Tls() if tls is True else tls or None,
        token_file=token_file,
        insecure=insecure,
        patience_s=patience_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of a service and the way to connect to it, as plain data; see `connect`, whose arguments it has.

    Attributes:
        ca: PEM file of the authority to trust, for TLS.
        certificate: PEM file of this client's certificate, for mutual TLS.
        key: PEM file of its key.
    """

    address: str | None = None
    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    token_file: str | None = None
    insecure: bool = False
    patience_s: float = 5.0

    def connect(self) -> Client:
        """Return a client of the service.

        Raises:
            FxlibError: a TLS file cannot be read.
        """
        tls = Tls(ca=self.ca, certificate=self.certificate, key=self.key)
        try:
            return connect(
                self.address,
                tls=tls if self.tls or tls != Tls() else False,
                token_file=self.token_file,
                insecure=self.insecure,
                patience_s=self.patience_s,
            )
        except OSError as error:
            raise FxlibError(f"{error.strerror}: {error.filename}", where="TLS") from error


class Client:
    """A connection to the service. Use it in a `with` block, or call `close`."""

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token_file: Path | str | None = None,
        insecure: bool = False,
        patience_s: float = 5.0,
    ) -> None:
        """See `connect`."""
        self._open = partial(Connection, address, tls=tls, token_file=token_file, insecure=insecure)
        self._connection = self._open()
        self._tls, self._insecure = tls, insecure
        self._patience_s = patience_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def speaking_for(self, token: str) -> Client:
        """Return a client of the same service that shows another user's token; only that decides what it may do.

        Raises:
            CredentialError: the text is not a token, or tokens have no meaning on this connection.
        """
        if not is_token(token):
            raise CredentialError("that is no token: one line of printable characters without blanks")
        other = Client.__new__(Client)
        other._tls, other._insecure, other._patience_s = self._tls, self._insecure, self._patience_s
        other._open = partial(Connection, self._connection.address, tls=self._tls, insecure=self._insecure, token=token)
        other._connection = other._open()
        return other

    def close(self) -> None:
        """Close the connection; a submitted job that is not ready yet ends with its original module."""
        self._connection.close()

    def optimize(
        self,
        model: Model,
        workload: Workload,
        *,
        progress: bool = True,
        group: Group | None = None,
        **asked: Unpack[RequestOptions],
    ) -> Result:
        """Ask for a faster module, and wait for it.

        First the model runs once on a sample of the workload, if no server and no other rank would notice; its
        exceptions are raised here. Any later failure (no service, no time, a refusal, a graph that is not valid) ends
        with a warning and the original module.

        Args:
            model: a module, captured or not, a graph of torch.fx, or an exported program. A model that is not a graph
                is captured; one that cannot be traced is exported with the workload's batches.
            workload: how the model's step runs.
            progress: whether to show progress on standard error.
            group: a process group of `torch.distributed`, or "world", all of whose ranks call this at the same time,
                for the same model: its rank 0 asks, and all of them adopt the answer, or none does. None: this process
                asks for itself.
            **asked: see `Question`.

        Raises:
            TypeError, WorkloadError: the arguments make no sense.
            Exception: whatever the model, or the loss, raises on a batch of the workload; see `run_sample`.
        """
        rendezvous = _rendezvous_of(group)
        _, run = self._begin(model, workload, asked, rendezvous)
        shows = progress and not disabled() and (rendezvous is None or rendezvous.rank == 0)
        with display() if shows else nullcontext(Silent()) as shown:
            outcome = run(shown)
        if outcome.problem:
            warnings.warn(outcome.problem, FxlibWarning, stacklevel=2)
        return outcome.result

    def submit(
        self,
        model: Model,
        workload: Workload,
        *,
        group: Group | None = None,
        discover: bool = False,
        **asked: Unpack[RequestOptions],
    ) -> Handle:
        """Ask for a faster module, and return at once: train with the original, and `swap` between two steps.

        The model is captured and encoded before this returns; only the exchange with the service runs on a thread. Keep
        the client open until the handle is ready.

        Args:
            model: as for `optimize`.
            workload: how the model's step runs.
            group: as for `optimize`; its ranks swap at the same step.
            discover: whether to note calls that no graph fits (another mode, no mask), for which the original runs, and
                to ask about each kind, described by shapes and ranges, in a separate job. `swap` captures the model for
                that, and adds the adopted graphs. Not with `group`.
            **asked: see `Question`.

        Raises:
            TypeError, WorkloadError: the arguments make no sense.
            Exception: whatever the model, or the loss, raises on a batch of the workload; see `run_sample`.
        """
        if discover and group is not None:
            raise WorkloadError(
                "ranks meet calls at different steps",
                where="submit(discover=)",
                hint="Name the variants in the workload, or leave group= out.",
            )
        rendezvous = _rendezvous_of(group)
        module, run = self._begin(model, workload, asked, rendezvous)
        discovery = Discovery(self._asking(asked), Question(**asked), workload) if discover else None
        return Handle(
            model if isinstance(model, nn.Module) else module,
            lambda: run(Silent()),
            None if rendezvous is None else Turn(rendezvous),
            None if disabled() else discovery,
        )

    @tracing.span("client.hand_in")
    def hand_in(
        self, model: Model, workload: Workload, *, request_id: str = "", **asked: Unpack[RequestOptions]
    ) -> Job | Result:
        """Ask for a faster module, and return the job as the service accepted it, without waiting for its answer.

        If there is nothing to ask, since the model cannot be captured or no worker could measure it, the result says
        so.

        Args:
            model: as for `optimize`.
            workload: how the model's step runs.
            request_id: the request's own id: handing the same request in again with the same id returns the job that
                exists already. By default each call makes a new job, unless a finished one answers it.
            **asked: see `Question`.

        Raises:
            TypeError, WorkloadError: the arguments make no sense.
            RemoteError: the service cannot be reached, or refuses.
            Exception: whatever the model, or the loss, raises on a batch of the workload; see `run_sample`.
        """
        question = Question(**asked)
        own = _question_of(model, workload, question)
        if isinstance(own, Outcome):
            return own.result
        if request_id:
            own.request.request_id = request_id
        inquiry = Inquiry(self._connection, Deadline(question.deadline_s), self._patience_s, Silent())
        try:
            return inquiry.hand_in(own)
        except UnservedError as error:
            return kept(own.captured, error).result

    def _asking(self, asked: RequestOptions) -> Callable[[Prepared], Outcome]:
        """Return a function that asks one further question, with the time limit of the first."""
        limit_s = Question(**asked).deadline_s

        def ask_one(prepared: Prepared) -> Outcome:
            with tracing.span("client.optimize") as span:
                outcome = ask(self._connection, prepared, Deadline(limit_s), self._patience_s, Silent())
                _note(span, prepared, outcome)
            return outcome

        return ask_one

    def job(self, job_id: str, *, timeout_s: float = 30.0) -> Job:
        """Return one job.

        Raises:
            RemoteError: the service cannot be reached, or knows no such job.
        """
        return get_job(self._connection, job_id, self._reached(timeout_s))

    def jobs(
        self,
        *,
        namespace: str = "",
        name: str = "",
        labels: Mapping[str, str] | None = None,
        states: Sequence[State] = (),
        id_prefix: str = "",
        limit: int = 50,
        timeout_s: float = 30.0,
    ) -> list[Job]:
        """List jobs, the newest first; an empty argument matches any job.

        A job that succeeded has only the decision, the reason and the figures of its report.

        Raises:
            RemoteError: the service cannot be reached, or refuses.
        """
        deadline, found = self._reached(timeout_s), list[Job]()
        wanted = JobFilter(namespace=namespace, name=name, labels=labels or {}, states=states, id_prefix=id_prefix)
        page = JobPage(jobs=[], following="")
        while len(found) < limit:
            page = self._page(wanted, deadline, size=min(limit - len(found), _PAGE), token=page.following)
            found += page.jobs
            if not page.following:
                break
        return found[:limit]

    def page(
        self,
        wanted: JobFilter | None = None,
        *,
        size: int = 50,
        token: str = "",
        oldest_first: bool = False,
        timeout_s: float = 30.0,
    ) -> JobPage:
        """List one page of jobs, as `jobs` does, the newest first by default.

        Args:
            wanted: the filter for the jobs; None: all of them.
            size: number of jobs on a page; the service returns at most 500.
            token: `following` of the previous page; "": the first page.
            oldest_first: whether the oldest job comes first.
            timeout_s: time limit, in seconds.

        Raises:
            RemoteError: the service cannot be reached, or refuses.
        """
        deadline = self._reached(timeout_s)
        return self._page(wanted or JobFilter(), deadline, size=size, token=token, oldest_first=oldest_first)

    def _page(
        self, wanted: JobFilter, deadline: Deadline, *, size: int, token: str, oldest_first: bool = False
    ) -> JobPage:
        request = filter_to_proto(wanted)
        request.page_size, request.page_token, request.oldest_first = size, token, oldest_first
        answer = self._connection.call(
            "listing jobs", lambda left_s: self._connection.jobs.ListJobs(request, timeout=left_s), deadline
        )
        return JobPage(jobs=[job_from_proto(job) for job in answer.jobs], following=answer.next_page_token)

    def watch(
        self, job_id: str, listener: Callable[[Event], None], *, after: int = 0, timeout_s: float = 86_400.0
    ) -> Job:
        """Tell `listener` every event of a job whose sequence is greater than `after`, and return the finished job.

        Raises:
            RemoteError: the service cannot be reached or knows no such job, or the time limit passed.
        """
        return follow(self._connection, job_id, self._reached(timeout_s), listener, after=after)

    def cancel(self, job_id: str, *, timeout_s: float = 30.0) -> Job:
        """Cancel a job; one that is done stays as it is.

        Raises:
            RemoteError: the service cannot be reached, or knows no such job.
        """
        request, deadline = jobs_pb2.CancelJobRequest(job_id=job_id), self._reached(timeout_s)
        answer = self._connection.call(
            "cancelling the job", lambda left_s: self._connection.jobs.CancelJob(request, timeout=left_s), deadline
        )
        return job_from_proto(answer.job)

    def retry(self, job_id: str, *, request_id: str = "", timeout_s: float = 30.0) -> Job:
        """Make a new job from an earlier one's request, to be measured anew.

        Args:
            job_id: the earlier job.
            request_id: the new request's own id: retrying again with the same id returns the same job.
            timeout_s: time limit, in seconds.

        Raises:
            RemoteError: the service cannot be reached, knows no such job, or now refuses its request.
        """
        request = jobs_pb2.RetryJobRequest(job_id=job_id, request_id=request_id or uuid.uuid4().hex)
        deadline = self._reached(timeout_s)
        answer = self._connection.call(
            "retrying the job", lambda left_s: self._connection.jobs.RetryJob(request, timeout=left_s), deadline
        )
        return job_from_proto(answer.job)

    def capabilities(self, *, timeout_s: float = 30.0) -> jobs_pb2.GetCapabilitiesResponse:
        """Return what the service and its live workers can do.

        Raises:
            RemoteError: the service cannot be reached, or refuses.
        """
        request, deadline = jobs_pb2.GetCapabilitiesRequest(), self._reached(timeout_s)
        return self._connection.call(
            "asking what the service can do",
            lambda left_s: self._connection.jobs.GetCapabilities(request, timeout=left_s),
            deadline,
        )

    def passes(self, *, timeout_s: float = 30.0) -> jobs_pb2.ListPassesResponse:
        """Return the passes and recipes that the service knows.

        Raises:
            RemoteError: the service cannot be reached.
        """
        request, deadline = jobs_pb2.ListPassesRequest(), self._reached(timeout_s)
        return self._connection.call(
            "listing passes", lambda left_s: self._connection.jobs.ListPasses(request, timeout=left_s), deadline
        )

    def _reached(self, timeout_s: float) -> Deadline:
        deadline = Deadline(timeout_s)
        self._connection.reach(deadline.within(self._patience_s))
        return deadline

    def _begin(
        self, model: Model, workload: Workload, asked: RequestOptions, rendezvous: Rendezvous | None
    ) -> tuple[nn.Module, Callable[[Progress], Outcome]]:
        """Do the part that needs the caller's thread, while the model does not run.

        Return the module to train with meanwhile, and a function for everything else, which does not raise.
        """
        span = tracing.begin("client.optimize")
        try:
            question = Question(**asked)
            deadline = Deadline(question.deadline_s)
            with tracing.span("client.capture", span.traceparent):
                own = _question_of(model, workload, question)
        except Exception as error:
            span.fail(error)
            span.end()
            if rendezvous is not None:
                withdraw(rendezvous, str(error))
            raise
        module: nn.Module = own.captured if isinstance(own, Prepared) else own.result.module

        def asked_for(progress: Progress) -> Outcome:
            if rendezvous is not None:
                inquiry = Inquiry(self._connection, deadline, self._patience_s, progress)
                return ask_together(rendezvous, own, deadline, inquiry.answer)
            if isinstance(own, Outcome):
                return own
            return ask(self._connection, own, deadline, self._patience_s, progress)

        def watchable(progress: Progress) -> Outcome:
            with span.current():
                outcome = asked_for(progress)
                _note(span, own, outcome)
            watcher = partial(self._watch_steps, outcome.result, own, workload)
            return replace(outcome, result=replace(outcome.result, watcher=watcher))

        return module, watchable

    def _watch_steps(
        self, result: Result, own: Prepared | Outcome, workload: Workload, options: WatchOptions
    ) -> StepWatch:
        """Watch the steps of a launcher that trains with a result; this client may be closed by then."""
        original, least_gain = None, 0.0
        if isinstance(own, Prepared) and result.decision == "adopt":
            least_gain = own.request.trial.min_gain
            if isinstance(own.captured, CapturedModule):
                original = copy.copy(own.captured)
        return StepWatch(
            result.module,
            original=original,
            job_id=result.job_id,
            samples=workload.samples_per_step,
            least_gain=least_gain,
            report=partial(self._report_live, result.job_id) if result.job_id else None,
            options=options,
        )

    def _report_live(self, job_id: str, live: LiveFigures) -> None:
        """Report the live figures of a job's training to the service, over a connection of this call's own."""
        request = jobs_pb2.ReportLiveRequest(job_id=job_id, live=live_to_proto(live))
        connection, deadline = self._open(), Deadline(_REPORT_S)
        try:
            connection.call(
                "reporting live figures", lambda left_s: connection.jobs.ReportLive(request, timeout=left_s), deadline
            )
        finally:
            connection.close()


def _note(span: tracing.Span, own: Prepared | Outcome, outcome: Outcome) -> None:
    """Add the question and its answer to the span."""
    if isinstance(own, Prepared):
        span.note(model=own.request.name, recipe=own.request.recipe.name)
    result = outcome.result
    reason, gain = result.reason and result.reason.name, result.gain and result.gain.value
    span.note(job_id=result.job_id, cached=result.cached, decision=result.decision, reason=reason, gain=gain)
    if outcome.problem:
        span.fail(outcome.problem)


def _rendezvous_of(group: Group | None) -> Rendezvous | None:
    """Return the rendezvous of the ranks that ask together; None if this process asks alone, or should not ask.

    Raises:
        WorkloadError: there are no such ranks.
    """
    if group is None:
        return None
    if not disabled():
        return Rendezvous(group)
    if dist.is_initialized():
        with suppress(WorkloadError, RuntimeError):  # it must not fail when fxlib is disabled
            withdraw(Rendezvous(group), f"{DISABLE} is set")
    return None


def _question_of(model: Model, workload: Workload, question: Question) -> Prepared | Outcome:
    """Capture and encode the model, or say why there is nothing to ask.

    Raises:
        TypeError, WorkloadError: the arguments make no sense.
        Exception: whatever the model raises on a sample of the workload.
    """
    if not isinstance(workload, Workload):
        raise TypeError(f"a Workload is wanted, not {type(workload).__name__}")
    try:
        original = as_module(model)
    except CaptureError as error:
        assert not isinstance(model, nn.Module)  # noqa: S101 - a module is one already
        return kept(model.module(), error)
    try:
        _check_torch()
        # Captured even when disabled, since fxlib.push_gradients works only with captured modules.
        original = captured = captured_of(original, workload, question)
        if disabled():
            return Outcome(result=Result.original(left_alone(captured), f"{DISABLE} is set"))
        check_measurable(captured, workload)
    except WorkloadError:
        raise
    except Exception as error:  # noqa: BLE001 - promised: whatever cannot be rewritten trains as it is
        calls = bool(workload.servers or workload.contracts) or rpc.api._is_current_rpc_agent_set()
        train_as_written(original, workload.contracts, calls=calls and workload.mode == "local")
        return kept(original, error)
    ran = run_sample(captured, workload)
    try:
        return prepare(captured, workload, question, ran=ran)
    except WorkloadError:
        raise
    except Exception as error:  # noqa: BLE001 - the same
        return kept(captured, error)


def _check_torch() -> None:
    """Check that torch is of a version whose internals this release of fxlib knows.

    Raises:
        FxlibError: it is another version.
    """
    first, after = TORCH_VERSIONS
    installed = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not first <= installed < after:
        known = f">={'.'.join(map(str, first))},<{'.'.join(map(str, after))}"
        hint = f"Install torch{known}, or a release of fxlib that is for this one."
        raise FxlibError(f"this release of fxlib is not for torch {torch.__version__}", hint=hint)
