"""One job, from its lease to its answer: fetch what it names, rewrite its graph, try it, report."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from fxlib import wire
from fxlib.errors import FxlibError, RemoteError
from fxlib.protocol import blobs_of, report_to_proto
from fxlib.spec.job import Blob
from fxlib.spec.report import Report
from fxlib.spec.variant import MAIN
from fxlib.v1 import jobs_pb2
from fxlib_workers import logs
from fxlib_workers.config import Config
from fxlib_workers.exchange.job_folder import JobFolder
from fxlib_workers.lease import ActiveLease
from fxlib_workers.process.host_lock import HostLock
from fxlib_workers.rewrite.sandbox import RewriteSandbox
from fxlib_workers.service_client import ServiceClient
from fxlib_workers.trial.driver import TrialDriver

_LOG: Final = logs.Log(__name__)

_UNREADABLE: Final = "UNREADABLE_REQUEST"


@dataclass(frozen=True, kw_only=True)
class JobRunner:
    """Runs the jobs of one worker.

    Attributes:
        config: the worker's options.
        service: where blobs come from and answers go.
        lock: the lock by which rewrites and trials share the host.
        driver: the process that runs trials.
        root: the worker's folder; each job has one of its own in it.
    """

    config: Config
    service: ServiceClient
    lock: HostLock
    driver: TrialDriver
    root: Path

    def run(self, lease: ActiveLease) -> None:
        """Find the job's answer and hand it in.

        Raises:
            LeaseOverError: the job is no longer this worker's to finish.
            RemoteError: the service stayed away, or refuses the answer.
        """
        folder = JobFolder(Path(tempfile.mkdtemp(dir=self.root, prefix="job-")))
        try:
            self.service.complete(lease.message, self._answer(folder, lease))
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)

    def _answer(self, folder: JobFolder, lease: ActiveLease) -> jobs_pb2.JobResult | jobs_pb2.JobFailure:
        job = lease.job_id
        try:
            start = time.monotonic()
            self._fetch(folder, lease)
            fetched = time.monotonic()
        except RemoteError:
            raise
        except FxlibError as error:
            return jobs_pb2.JobFailure(code=_UNREADABLE, message=str(error))
        _LOG.info("fetched", job=job, seconds=fetched - start)
        with ExitStack() as open_:
            with self.lock.rewriting(lease.check):
                sandboxes = {
                    name: open_.enter_context(self._sandbox(each, lease))
                    for name, each in {MAIN: folder, **folder.variants}.items()
                }
                reports = {name: self._rewrite(each, lease) for name, each in sandboxes.items()}
            report = self._try(folder, reports, sandboxes, lease)
        report = replace(
            report,
            hardware=self.service.info.hardware,
            torch_version=str(torch.__version__),
            phase_seconds={"fetch": fetched - start, **report.phase_seconds},
        )
        _LOG.info("decided", job=job, decision=report.decision, reason=report.reason and report.reason.name)
        graphs = {name: self._store(each) for name, each in folder.variants.items()}
        found = {name: graph for name, graph in graphs.items() if graph is not None}
        return report_to_proto(report, graph=self._store(folder), variant_graphs=found)

    def _sandbox(self, folder: JobFolder, lease: ActiveLease) -> RewriteSandbox:
        trial = self.config.trial
        return RewriteSandbox(
            folder,
            self.config.rewrite,
            self.root,
            lease.check,
            modules=trial.allowed_modules,
            keep_variables=trial.keep_variables,
        )

    def _store(self, folder: JobFolder) -> Blob | None:
        """Upload the graph that the answer speaks of, if there is one, and before it the values that it names."""
        if not folder.rewritten.exists():
            return None
        graph = folder.rewritten.read_bytes()
        self.service.store_all(folder.values_in(graph))
        return self.service.store(graph)

    def _fetch(self, folder: JobFolder, lease: ActiveLease) -> None:
        request = lease.message.request
        original = self.service.fetch(request.graph)
        variants = [self.service.fetch(each.graph) for each in request.variants]
        workloads = [request.workload, *(each.workload for each in request.variants)]
        wanted = [ref for each in workloads for ref in blobs_of(each)]
        wanted += [ref for graph in (original, *variants) for ref in wire.values_of(wire.parse(graph))]
        blobs = {sha256: self.service.fetch(ref) for sha256, ref in {ref.sha256: ref for ref in wanted}.items()}
        folder.fill(request, original, blobs, variants)

    def _rewrite(self, sandbox: RewriteSandbox, lease: ActiveLease) -> Report:
        start = time.monotonic()
        lease.report_progress("rewrite", "rewriting the graph")
        report = sandbox.rewrite()
        changes = sum(each.changes for each in report.passes)
        _LOG.info("rewritten", job=lease.job_id, seconds=time.monotonic() - start, changes=changes)
        return report

    def _rewrite_again(self, sandbox: RewriteSandbox, lease: ActiveLease) -> None:
        report = sandbox.rewrite()
        if report.reason is not None:  # the candidates that were made without a profile stay
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
        # A list of passes is exactly what was asked for: a profile would change nothing. Nor would it for a graph
        # without calls, since a profile tells of calls, and of the local work behind which they can be hidden.
        exact = bool(lease.message.request.recipe.passes)
        plans = {
            name: partial(self._rewrite_again, sandboxes[name], lease)
            for name, report in reports.items()
            if not exact and report.calls
        }
        start = time.monotonic()
        lease.report_progress("sameness", "waiting for the host")
        with self.lock.measuring(lease.check):
            report = self.driver.run(folder, lease.report_progress, lease.check, plans)
        gain = f"{report.gain.value:+.1%}" if report.gain else "none"
        _LOG.info("tried", job=lease.job_id, seconds=time.monotonic() - start, gain=gain)
        return report
