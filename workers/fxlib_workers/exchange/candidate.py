"""What a trial compares: the original, and the candidates that a job's recipe and its alternatives make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from fxlib.spec.report import CandidateReport, Report

Arm = str
"""The name of a program in a trial: the original's, or a candidate's."""

ORIGINAL: Final[Arm] = "original"

REALIGNED: Final[Arm] = "original, elsewhere in memory"
"""The original once more, its tensors on memory of another alignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rewritten graph that has not been measured yet.

    Attributes:
        graph: the graph, serialized.
        report: what the passes did; the first row among its candidates is this one's, and the others are of programs
            that were not made.
        values: the tensors that the graph holds besides the original's, as blobs by SHA-256.
    """

    graph: bytes
    report: Report
    values: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def row(self) -> CandidateReport:
        """The candidate's row in reports: its name, and the step time that the cost model expects of it."""
        return self.report.candidates[0]

    @property
    def name(self) -> str:
        """The name by which people and the trial know it."""
        return self.row.name
