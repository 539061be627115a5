"""The data that a worker's processes exchange about one job: a folder of protobuf files, and lines of progress.

A trial compares programs: the original, and the candidates that a job's recipe and its alternatives make of it. The
folder holds these files.

request.pb             the client's request
original.pb            its graph
blobs/SHA256           the blobs that the workload and the graphs name
profile.pb             the profile of the original           (written by the trial, if the client sent none)
rewrite.pb             calls, passes, reasons                (by the rewriting process; of the first candidate)
candidates/RANK.pb     a rewritten graph, the best first     (by the rewriting process)
candidates/RANK.report what the passes did there             (by the rewriting process)
rewritten.pb           the graph chosen among them           (the first: by the rewriting process; then by the trial)
report.pb              the whole answer                      (by the trial)
variants/INDEX/        the same for a variant of the request (without report.pb; its blobs are those above)
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Protocol

from fxlib import wire
from fxlib.protocol import (
    profile_from_proto,
    profile_to_proto,
    report_from_proto,
    report_to_proto,
    trial_from_proto,
    workload_from_proto,
)
from fxlib.spec.job import TrialOptions
from fxlib.spec.profile import Profile
from fxlib.spec.report import CandidateReport, Report
from fxlib.spec.workload import Workload
from fxlib.v1 import jobs_pb2, profile_pb2

Arm = str
"""The name of a program in a trial, which is the original or a candidate."""

ORIGINAL: Final[Arm] = "original"

REALIGNED: Final[Arm] = "original, elsewhere in memory"
"""The name of the original run once more, with its tensors in memory of another alignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rewritten graph that has not been measured yet.

    Attributes:
        graph: the graph, serialized.
        report: what the passes did; the first row among its candidates is for this one, and the others are for programs
            that were not made.
        values: the tensors that the graph holds in addition to the original's, as blobs by SHA-256.
    """

    graph: bytes
    report: Report
    values: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def row(self) -> CandidateReport:
        """The candidate's row in reports, with its name and the step time that the cost model expects."""
        return self.report.candidates[0]

    @property
    def name(self) -> str:
        """The name of the candidate for people and for the trial."""
        return self.row.name


_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class ReportProgress(Protocol):
    """A function that adds progress to the job's history.

    It takes the phase, a line for people, and the share that is done, from 0 to 1 (None if unknown). The phases of a
    trial are "profile", "sameness", "choice" and "qps".
    """

    def __call__(self, phase: str, message: str, progress: float | None = None, /) -> None:
        """Add a line to the history."""


class JobFolder:
    """The files of one job.

    Args:
        path: the folder.
        blobs: the folder of the blobs, if it is another job's: no link to it is followed.
    """

    def __init__(self, path: Path, *, blobs: Path | None = None) -> None:
        self.path = path
        self.original = path / "original.pb"
        self.rewritten = path / "rewritten.pb"
        self._request = path / "request.pb"
        self._profile = path / "profile.pb"
        self._rewrite = path / "rewrite.pb"
        self._candidates = path / "candidates"
        self._report = path / "report.pb"
        self._blobs = blobs or path / "blobs"

    def fill(
        self,
        request: jobs_pb2.OptimizeRequest,
        original: bytes,
        blobs: Mapping[str, bytes],
        variants: Sequence[bytes] = (),
    ) -> None:
        """Write the client's data; `variants` are the graphs of the request's variants, in the same order."""
        self._blobs.mkdir()
        self._request.write_bytes(request.SerializeToString())
        self.original.write_bytes(original)
        for sha256, data in blobs.items():
            (self._blobs / sha256).write_bytes(data)
        for (variant, folder), graph in zip(self._variants(request), variants, strict=True):
            folder.path.mkdir(parents=True)
            (folder.path / "blobs").symlink_to(self._blobs)  # for its rewrite
            folder._request.write_bytes(_request_of(request, variant).SerializeToString())
            folder.original.write_bytes(graph)

    @property
    def writable(self) -> tuple[Path, ...]:
        """The folders that a rewrite writes to: this one, and that of the blobs, which is elsewhere for a variant."""
        blobs = self._blobs.resolve()
        return (self.path,) if blobs.is_relative_to(self.path) else (self.path, blobs)

    @property
    def variants(self) -> dict[str, JobFolder]:
        """The folders of the request's variants, by name. Each looks like the folder of a separate job."""
        return {variant.name: folder for variant, folder in self._variants(self.request())}

    def _variants(self, request: jobs_pb2.OptimizeRequest) -> list[tuple[jobs_pb2.VariantRequest, JobFolder]]:
        paths = [self.path / "variants" / str(index) for index in range(len(request.variants))]
        folders = [JobFolder(path, blobs=self._blobs) for path in paths]
        return list(zip(request.variants, folders, strict=True))

    def request(self) -> jobs_pb2.OptimizeRequest:
        """Read the client's request."""
        return jobs_pb2.OptimizeRequest.FromString(_read(self._request))

    def graph(self) -> bytes:
        """Read the client's graph."""
        return _read(self.original)

    def blobs(self) -> dict[str, bytes]:
        """Read the blobs that the workload and the graphs name, by SHA-256."""
        return {path.name: _read(path) for path in self._blobs.iterdir()}

    def workload(self) -> Workload:
        """Read the workload."""
        return workload_from_proto(self.request().workload, self.blobs())

    def options(self) -> TrialOptions:
        """Read the options by which the trial measures and decides."""
        return trial_from_proto(self.request().trial)

    def profile(self) -> Profile | None:
        """Read the profile: the one that the trial recorded, or else the client's if it sent one."""
        if self._profile.exists():
            return profile_from_proto(profile_pb2.Profile.FromString(_read(self._profile)))
        request = self.request()
        return profile_from_proto(request.profile) if request.HasField("profile") else None

    def write_profile(self, profile: Profile) -> None:
        """Write the profile that was measured of the original.

        Raises:
            WireError, LimitError: the profile could not be read again.
        """
        message = profile_to_proto(profile)
        profile_from_proto(message)
        # Whatever the umask is, since a rewrite reads it as another user, which may put a link in its place at once.
        _write(self._profile, message.SerializeToString(), mode=0o644)

    def write_rewrite(self, report: Report, candidates: Sequence[Candidate] = ()) -> None:
        """Write what the passes did, and the graphs that they made, the most promising first, which is chosen."""
        beside = self._candidates.with_suffix(".part")
        shutil.rmtree(beside, ignore_errors=True)  # the remains of a process that was killed
        beside.mkdir()
        for rank, candidate in enumerate(candidates):
            (beside / f"{rank}.pb").write_bytes(candidate.graph)
            for sha256, data in candidate.values.items():
                (self._blobs / sha256).write_bytes(data)
            _write_report(beside / f"{rank}.report", candidate.report)
        shutil.rmtree(self._candidates, ignore_errors=True)
        beside.replace(self._candidates)
        if candidates:
            self.choose(candidates[0])
        _write_report(self._rewrite, report)

    def read_rewrite(self) -> Report:
        """Read what the passes did."""
        return _read_report(self._rewrite)

    def candidates(self) -> tuple[Candidate, ...]:
        """Read the rewritten graphs and what the passes did to each, the most promising first."""
        graphs = [self._candidates / f"{rank}.pb" for rank in range(len(list(self._candidates.glob("*.pb"))))]
        return tuple(
            Candidate(graph=graph, report=_read_report(path.with_suffix(".report")), values=self.values_in(graph))
            for path in graphs
            for graph in [_read(path)]
        )

    def values_in(self, graph: bytes) -> dict[str, bytes]:
        """Read the blobs that a rewritten graph names, by SHA-256.

        Raises:
            OSError: a blob does not exist, or its name may be a path: a stranger's graph may have written the graph.
        """
        names = [ref.sha256 for ref in wire.values_of(wire.parse(graph))]
        if wrong := [name for name in names if not _SHA256.fullmatch(name)]:
            raise OSError(errno.EINVAL, "not the name of a blob", wrong[0][:80])
        return {name: _read(self._blobs / name) for name in names}

    def choose(self, candidate: Candidate) -> None:
        """Make a candidate's graph the one that the answer names."""
        _write(self.rewritten, candidate.graph)

    def chosen(self) -> bytes | None:
        """Read the graph that the answer names; None if it is the original."""
        try:
            return _read(self.rewritten)
        except FileNotFoundError:
            return None

    def write_report(self, report: Report) -> None:
        """Write the answer."""
        _write_report(self._report, report)

    def read_report(self) -> Report:
        """Read the answer."""
        return _read_report(self._report)


def _request_of(request: jobs_pb2.OptimizeRequest, variant: jobs_pb2.VariantRequest) -> jobs_pb2.OptimizeRequest:
    """Return the part of the request about one variant, as a separate request."""
    own = jobs_pb2.OptimizeRequest()
    own.CopyFrom(request)
    own.ClearField("variants")
    own.ClearField("profile")
    own.graph.CopyFrom(variant.graph)
    own.workload.CopyFrom(variant.workload)
    if variant.HasField("profile"):
        own.profile.CopyFrom(variant.profile)
    return own


def _write_report(path: Path, report: Report) -> None:
    beside = path.with_suffix(".part")
    _write(beside, report_to_proto(report).SerializeToString())
    beside.replace(path)


def _read_report(path: Path) -> Report:
    return report_from_proto(jobs_pb2.JobResult.FromString(_read(path)))


def _write(path: Path, data: bytes, *, mode: int | None = None) -> None:
    with _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(data)


def _read(path: Path) -> bytes:
    with _open(path, os.O_RDONLY) as file:
        return file.read()


def _open(path: Path, flags: int) -> IO[bytes]:
    """Open a file that is neither a link nor a pipe, in a folder that a stranger's graph may have written or replaced.

    Raises:
        OSError: it does not exist, or is not a regular file, or its folder is a link.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(descriptor, "wb" if flags & os.O_WRONLY else "rb")
