"""One job, from its lease to its answer: fetch its blobs, rewrite its graph, try the candidates, and report."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from fxlib import wire
from fxlib.errors import FxlibError, RejectedError, RemoteError
from fxlib.protocol import blobs_of, report_to_proto
from fxlib.spec.job import Blob
from fxlib.spec.report import Report
from fxlib.spec.workload import MAIN
from fxlib.utils import tracing
from fxlib.v1 import jobs_pb2
from fxlib_workers import logs
from fxlib_workers.config import Config
from fxlib_workers.exchange import JobFolder, ReportProgress
from fxlib_workers.lease import ActiveLease
from fxlib_workers.process.containment import Containment, unused_user
from fxlib_workers.process.forking import Forker
from fxlib_workers.process.host_lock import HostLock
from fxlib_workers.rewrite.sandbox import RewriteSandbox
from fxlib_workers.service_client import ServiceClient
from fxlib_workers.trial.driver import RefusedJobError, TrialDriver

_LOG: Final = logs.Log(__name__)

_UNREADABLE: Final = "UNREADABLE_REQUEST"

_LOST: Final = frozenset({"BLOB_NOT_FOUND", "BLOB_CORRUPT"})
"""The service's error codes for a lost blob of the job, which another worker would not find either."""

_MISSING: Final = _LOST | {"BLOB_MISSING"}
"""The service's error codes for a graph of the answer that was lost after its upload."""


class _Phases:
    """Passes on the progress of a trial, and makes a span for each phase, from its first line to that of the next."""

    def __init__(self, report_progress: ReportProgress) -> None:
        self._report_progress = report_progress
        self._phase, self._span = "", tracing.Span()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._span.fail(error)
        self._span.end()

    def report_progress(self, phase: str, message: str, progress: float | None = None, /) -> None:
        """Pass on a line."""
        if phase != self._phase:
            self._span.end()
            self._phase, self._span = phase, tracing.begin(f"worker.trial.{phase}")
        self._report_progress(phase, message, progress)


@dataclass(frozen=True, kw_only=True)
class JobRunner:
    """Runs the jobs of one worker.

    Attributes:
        config: the worker's options.
        service: the client from which blobs come and to which answers go.
        lock: the lock by which rewrites and trials share the host.
        driver: the process that runs trials.
        forker: the forker of rewriting processes.
        containment: the policy by which rewrites are contained.
        root: the worker's folder, in which each job has its own folder.
    """

    config: Config
    service: ServiceClient
    lock: HostLock
    driver: TrialDriver
    forker: Forker
    containment: Containment
    root: Path

    def run(self, lease: ActiveLease) -> None:
        """Find the job's answer and submit it.

        Raises:
            LeaseOverError: this worker may no longer finish the job.
            RemoteError: the service stayed unreachable, or refuses the answer.
        """
        folder = JobFolder(Path(tempfile.mkdtemp(dir=self.root, prefix="job-")))
        job, asked = lease.message, lease.message.request
        try:
            with tracing.span(
                "worker.run_job",
                asked.traceparent,
                job_id=job.job_id,
                attempt=job.attempt,
                worker=self.service.info.worker_id,
                model=asked.name,
                namespace=asked.namespace,
                recipe=asked.recipe.name,
            ) as span:
                found = self._find(folder, lease)
                if isinstance(found, jobs_pb2.JobFailure):
                    span.fail(f"{found.code}: {found.message}")
                    self.service.complete(lease.message, found, lease.check)
                else:
                    reason, gain = found.reason and found.reason.name, found.gain and found.gain.value
                    span.note(decision=found.decision, reason=reason, gain=gain)
                    self._hand_in(found, folder, lease)
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)

    @tracing.span("worker.hand_in")
    def _hand_in(self, report: Report, folder: JobFolder, lease: ActiveLease) -> None:
        """Upload the graphs of the answer and complete the job; upload them once more if the service has lost one."""
        for again in (True, False):
            graphs = {name: self._store(each, lease) for name, each in folder.variants.items()}
            found = {name: graph for name, graph in graphs.items() if graph is not None}
            result = report_to_proto(report, graph=self._store(folder, lease), variant_graphs=found)
            try:
                self.service.complete(lease.message, result, lease.check)
            except RejectedError as error:
                if error.code not in _MISSING or not again:
                    raise
                _LOG.warning("service has lost a graph", job=lease.job_id, error=error)
            else:
                return

    def _find(self, folder: JobFolder, lease: ActiveLease) -> Report | jobs_pb2.JobFailure:
        job = lease.job_id
        try:
            start = time.monotonic()
            self._fetch(folder, lease)
            fetched = time.monotonic()
        except RejectedError as error:
            if error.code not in _LOST:
                raise
            return jobs_pb2.JobFailure(code=error.code, message=str(error))
        except RemoteError:
            raise
        except FxlibError as error:
            return jobs_pb2.JobFailure(code=_UNREADABLE, message=str(error))
        _LOG.info("fetched", job=job, seconds=fetched - start)
        with ExitStack() as open_:
            with self.lock.rewriting(lease.check):
                # All of the job's rewrites have the same user, since they share its blobs.
                policy = replace(self.containment, user=unused_user())
                sandboxes = {
                    name: open_.enter_context(self._sandbox(each, lease, policy))
                    for name, each in {MAIN: folder, **folder.variants}.items()
                }
                reports = {name: self._rewrite(each, lease) for name, each in sandboxes.items()}
            try:
                report = self._try(folder, reports, sandboxes, lease)
            except RefusedJobError as error:
                return jobs_pb2.JobFailure(code=_UNREADABLE, message=str(error))
        report = replace(
            report,
            hardware=self.service.info.hardware,
            torch_version=str(torch.__version__),
            phase_seconds={"fetch": fetched - start, **report.phase_seconds},
        )
        _LOG.info("decided", job=job, decision=report.decision, reason=report.reason and report.reason.name)
        return report

    def _sandbox(self, folder: JobFolder, lease: ActiveLease, policy: Containment) -> RewriteSandbox:
        return RewriteSandbox(
            folder,
            self.config.rewrite,
            self.forker,
            lease.check,
            policy,
            modules=self.config.trial.allowed_modules,
        )

    def _store(self, folder: JobFolder, lease: ActiveLease) -> Blob | None:
        """Upload the values that the answer's graph names, then the graph itself, if there is one."""
        if (graph := folder.chosen()) is None:
            return None
        self.service.store_all(lease.message, folder.values_in(graph), lease.check)
        return self.service.store(lease.message, graph, lease.check)

    @tracing.span("worker.fetch")
    def _fetch(self, folder: JobFolder, lease: ActiveLease) -> None:
        request = lease.message.request
        original = self.service.fetch(request.graph)
        variants = [self.service.fetch(each.graph) for each in request.variants]
        workloads = [request.workload, *(each.workload for each in request.variants)]
        wanted = [ref for each in workloads for ref in blobs_of(each)]
        wanted += [ref for graph in (original, *variants) for ref in wire.values_of(wire.parse(graph))]
        blobs = {sha256: self.service.fetch(ref) for sha256, ref in {ref.sha256: ref for ref in wanted}.items()}
        folder.fill(request, original, blobs, variants)

    @tracing.span("worker.rewrite")
    def _rewrite(self, sandbox: RewriteSandbox, lease: ActiveLease) -> Report:
        start = time.monotonic()
        lease.report_progress("rewrite", "rewriting the graph")
        report = sandbox.rewrite()
        changes = sum(each.changes for each in report.passes)
        _LOG.info("rewritten", job=lease.job_id, seconds=time.monotonic() - start, changes=changes)
        return report

    def _rewrite_again(self, sandbox: RewriteSandbox, lease: ActiveLease) -> None:
        report = sandbox.rewrite()
        if report.reason is not None:  # keep the candidates that were made without a profile
            _LOG.warning("not planned anew", job=lease.job_id, reason=report.explanation)

    def _try(
        self,
        folder: JobFolder,
        reports: Mapping[str, Report],
        sandboxes: Mapping[str, RewriteSandbox],
        lease: ActiveLease,
    ) -> Report:
        if all(report.reason is not None for report in reports.values()):
            return replace(reports[MAIN], variants={name: reports[name] for name in folder.variants})
        # A list of passes is exactly what was asked for, so a profile would change nothing. Nor would it for a graph
        # without calls, since a profile describes calls, and the local work behind which they can be hidden.
        exact = bool(lease.message.request.recipe.passes)
        plans = {
            name: partial(self._rewrite_again, sandboxes[name], lease)
            for name, report in reports.items()
            if not exact and report.calls
        }
        start = time.monotonic()
        lease.report_progress("sameness", "waiting for the host")
        with tracing.span("worker.trial"), _Phases(lease.report_progress) as phases, self.lock.measuring(lease.check):
            report = self.driver.run(folder, phases.report_progress, lease.check, plans)
        gain = f"{report.gain.value:+.1%}" if report.gain else "none"
        _LOG.info("tried", job=lease.job_id, seconds=time.monotonic() - start, gain=gain)
        return report
