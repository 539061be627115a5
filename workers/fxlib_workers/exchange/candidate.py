"""A program that a job's recipe, or a variant of it, makes of the original, before anything was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from fxlib.spec.report import Candidate, Report

Arm = str
"""The original, or the name of a candidate."""

ORIGINAL: Final[Arm] = "original"

MOVED: Final[Arm] = "original, elsewhere in memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A rewritten graph.

    Attributes:
        graph: serialized.
        values: of tensors that it holds besides the original's, as blobs by SHA-256.
        report: what the passes did; its only candidate is this one, with what the cost model expects of it.
    """

    graph: bytes
    report: Report
    values: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def candidate(self) -> Candidate:
        """Its name, and what the cost model expects of it."""
        return self.report.candidates[0]

    @property
    def name(self) -> str:
        """By which people and the trial know it."""
        return self.candidate.name
