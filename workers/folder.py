"""What the processes of a worker hand each other about one job: files in a folder, all of them protobuf.

request.pb      the client's request
original.pb     its graph
blobs/SHA256    what the workload names
rewritten.pb    the rewritten graph     (written by the rewriting process, if anything changed)
rewrite.pb      calls, passes, reasons  (by the rewriting process)
report.pb       the whole answer        (by the trial)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fxlib.protocol import report_from_proto, report_to_proto, trial_from_proto, workload_from_proto
from fxlib.result import Report
from fxlib.trial import TrialOptions
from fxlib.v1 import jobs_pb2
from fxlib.workload import Workload


class JobFolder:
    """The files of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.original = path / "original.pb"
        self.rewritten = path / "rewritten.pb"
        self._request = path / "request.pb"
        self._rewrite = path / "rewrite.pb"
        self._report = path / "report.pb"
        self._blobs = path / "blobs"

    def fill(self, request: jobs_pb2.OptimizeRequest, original: bytes, blobs: Mapping[str, bytes]) -> None:
        """Write what the client sent."""
        self._blobs.mkdir()
        self._request.write_bytes(request.SerializeToString())
        self.original.write_bytes(original)
        for sha256, data in blobs.items():
            (self._blobs / sha256).write_bytes(data)

    def request(self) -> jobs_pb2.OptimizeRequest:
        """Read the client's request."""
        return jobs_pb2.OptimizeRequest.FromString(self._request.read_bytes())

    def blobs(self) -> dict[str, bytes]:
        """Read the blobs that the workload and the graph name, by SHA-256."""
        return {path.name: path.read_bytes() for path in self._blobs.iterdir()}

    def workload(self) -> Workload:
        """Read the workload."""
        return workload_from_proto(self.request().workload, self.blobs())

    def options(self) -> TrialOptions:
        """Read how the trial is to measure and decide."""
        return trial_from_proto(self.request().trial)

    def write_rewrite(self, report: Report) -> None:
        """Leave what the passes did."""
        _write(self._rewrite, report)

    def read_rewrite(self) -> Report:
        """Read what the passes did."""
        return _read(self._rewrite)

    def write_report(self, report: Report) -> None:
        """Leave the answer."""
        _write(self._report, report)

    def read_report(self) -> Report:
        """Read the answer."""
        return _read(self._report)


def _write(path: Path, report: Report) -> None:
    beside = path.with_suffix(".part")
    beside.write_bytes(report_to_proto(report).SerializeToString())
    beside.replace(path)


def _read(path: Path) -> Report:
    return report_from_proto(jobs_pb2.JobResult.FromString(path.read_bytes()))
