"""One job, from its lease to its answer: fetch, rewrite, try, report."""

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
from fxlib_workers.lease import Hold
from fxlib_workers.process.host_lock import HostLock
from fxlib_workers.rewrite.sandbox import Rewriting
from fxlib_workers.service_client import ServiceClient
from fxlib_workers.trial.driver import Trials

_UNREADABLE: Final = "UNREADABLE_REQUEST"


@dataclass(frozen=True, kw_only=True)
class JobRunner:
    """What all jobs of a worker share. `root`: the worker's folder."""

    config: Config
    link: ServiceClient
    lock: HostLock
    trials: Trials
    root: Path

    def work(self, hold: Hold) -> None:
        """Find the job's answer and hand it in.

        Raises:
            HoldOverError: the job is not wanted any more.
            RemoteError: the service stayed away, or refuses the answer.
        """
        folder = JobFolder(Path(tempfile.mkdtemp(dir=self.root, prefix="job-")))
        try:
            outcome = self._outcome(folder, hold)
            self.link.complete(hold.lease, outcome)
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)

    def _outcome(self, folder: JobFolder, hold: Hold) -> jobs_pb2.JobResult | jobs_pb2.JobFailure:
        job = hold.lease.job_id
        try:
            start = time.monotonic()
            self._fetch(folder, hold)
            fetched = time.monotonic()
        except RemoteError:
            raise
        except FxlibError as error:
            return jobs_pb2.JobFailure(code=_UNREADABLE, message=str(error))
        logs.info("fetched", job=job, seconds=fetched - start)
        with ExitStack() as open_:
            with self.lock.rewriting(hold.check):
                rewritings = {
                    name: open_.enter_context(self._rewriting(each, hold))
                    for name, each in {MAIN: folder, **folder.variants}.items()
                }
                reports = {name: self._rewrite(each, hold) for name, each in rewritings.items()}
            report = self._try(folder, reports, rewritings, hold)
        report = replace(
            report,
            hardware=self.link.info.hardware,
            torch_version=str(torch.__version__),
            phase_seconds={"fetch": fetched - start, **report.phase_seconds},
        )
        logs.info("decided", job=job, decision=report.decision, reason=report.reason and report.reason.name)
        graphs = {name: self._store(each) for name, each in folder.variants.items()}
        found = {name: graph for name, graph in graphs.items() if graph is not None}
        return report_to_proto(report, graph=self._store(folder), variant_graphs=found)

    def _rewriting(self, folder: JobFolder, hold: Hold) -> Rewriting:
        trial = self.config.trial
        return Rewriting(
            folder,
            self.config.rewrite,
            self.root,
            hold.check,
            modules=trial.allowed_modules,
            keeps=trial.keep_variables,
        )

    def _store(self, folder: JobFolder) -> Blob | None:
        """Upload the graph that the answer speaks of, if there is one, and before it the values that it names."""
        if not folder.rewritten.exists():
            return None
        graph = folder.rewritten.read_bytes()
        self.link.store_all(folder.values_in(graph))
        return self.link.store(graph)

    def _fetch(self, folder: JobFolder, hold: Hold) -> None:
        request = hold.lease.request
        original = self.link.fetch(request.graph)
        variants = [self.link.fetch(each.graph) for each in request.variants]
        workloads = [request.workload, *(each.workload for each in request.variants)]
        wanted = [ref for each in workloads for ref in blobs_of(each)]
        wanted += [ref for graph in (original, *variants) for ref in wire.values_of(wire.parse(graph))]
        blobs = {sha256: self.link.fetch(ref) for sha256, ref in {ref.sha256: ref for ref in wanted}.items()}
        folder.fill(request, original, blobs, variants)

    def _rewrite(self, rewriting: Rewriting, hold: Hold) -> Report:
        start = time.monotonic()
        hold.tell("rewrite", "rewriting the graph")
        report = rewriting.rewrite()
        changes = sum(each.changes for each in report.passes)
        logs.info("rewritten", job=hold.lease.job_id, seconds=time.monotonic() - start, changes=changes)
        return report

    def _plan_anew(self, rewriting: Rewriting, hold: Hold) -> None:
        report = rewriting.rewrite()
        if report.reason is not None:  # what was planned without a profile stands
            logs.warning("not planned anew", job=hold.lease.job_id, reason=report.explanation)

    def _try(
        self, folder: JobFolder, reports: Mapping[str, Report], rewritings: Mapping[str, Rewriting], hold: Hold
    ) -> Report:
        if all(report.reason is not None for report in reports.values()):
            return replace(reports[MAIN], variants={name: reports[name] for name in folder.variants})
        # A list of passes is exactly what was asked for: there is nothing to plan, nor to choose. Nor is there without
        # a call: a profile tells of calls, and of what there is to hide them behind.
        exact = bool(hold.lease.request.recipe.passes)
        plans = {
            name: partial(self._plan_anew, rewritings[name], hold)
            for name, report in reports.items()
            if not exact and report.calls
        }
        start = time.monotonic()
        hold.tell("sameness", "waiting for the host")
        with self.lock.measuring(hold.check):
            report = self.trials.run(folder, hold.tell, hold.check, plans)
        gain = f"{report.gain.value:+.1%}" if report.gain else "none"
        logs.info("tried", job=hold.lease.job_id, seconds=time.monotonic() - start, gain=gain)
        return report
