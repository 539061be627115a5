"""One job, from its lease to its answer: fetch, rewrite, try, report."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from fxlib import wire
from fxlib.errors import FxlibError, RemoteError
from fxlib.jobs import Blob
from fxlib.protocol import blobs_of, report_to_proto
from fxlib.result import Report
from fxlib.v1 import jobs_pb2
from workers import logs
from workers.config import Config
from workers.folder import JobFolder
from workers.hold import Hold
from workers.host_lock import HostLock
from workers.link import Link
from workers.rewriting import Rewriting
from workers.trials import Trials

_UNREADABLE: Final = "UNREADABLE_REQUEST"


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What all jobs of a worker share. `root`: the worker's folder."""

    config: Config
    link: Link
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
                trial = self.config.trial
                given = folder, self.config.rewrite, self.root, hold.check
                rewriting = open_.enter_context(
                    Rewriting(*given, modules=trial.allowed_modules, keeps=trial.keep_variables)
                )
                report = self._rewrite(rewriting, hold)
            report = self._try(folder, report, rewriting, hold)
        report = replace(
            report,
            hardware=self.link.info.hardware,
            torch_version=str(torch.__version__),
            phase_seconds={"fetch": fetched - start, **report.phase_seconds},
        )
        logs.info("decided", job=job, decision=report.decision, reason=report.reason and report.reason.name)
        return report_to_proto(report, graph=self._store(folder))

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
        wanted = (*blobs_of(request.workload), *wire.values_of(wire.parse(original)))
        blobs = {ref.sha256: self.link.fetch(ref) for ref in wanted}
        folder.fill(request, original, blobs)

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

    def _try(self, folder: JobFolder, report: Report, rewriting: Rewriting, hold: Hold) -> Report:
        if report.reason is not None:
            return report
        # A list of passes is exactly what was asked for: there is nothing to plan, nor to choose. Nor is there without
        # a call: a profile tells of calls, and of what there is to hide them behind.
        planned = bool(hold.lease.request.recipe.passes) or not report.calls
        plan = None if planned else lambda: self._plan_anew(rewriting, hold)
        start = time.monotonic()
        hold.tell("sameness", "waiting for the host")
        with self.lock.measuring(hold.check):
            report = self.trials.run(folder, hold.tell, hold.check, plan)
        gain = f"{report.gain.value:+.1%}" if report.gain else "none"
        logs.info("tried", job=hold.lease.job_id, seconds=time.monotonic() - start, gain=gain)
        return report
