"""The outcomes of the candidates of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxlib.spec.report import CandidateReport, CompiledPart, Estimate, Report
from fxlib_workers import logs
from fxlib_workers.exchange import Candidate
from fxlib_workers.trial.failures import TrialError

_LOG = logs.Log(__name__)


class CandidateOutcomes:
    """The candidates of a trial, the most promising first, with the outcome of each.

    Args:
        candidates: the candidates, at least one.

    Attributes:
        candidates: the candidates by name.
        not_reproduced: the names of the values in which the original does not reproduce itself.
        by_alignment: the names of the values in which a candidate differs as little as the original does in memory of
            another alignment, by candidate.
        errors: the largest relative error of each candidate's results, by candidate.
        unmeasured: the differing values of unknown error, by candidate, for candidates that do not promise the same
            bits.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates: dict[str, Candidate] = {each.name: each for each in candidates}
        self._rows: dict[str, CandidateReport] = {each.name: each.row for each in candidates}
        self._failures: dict[str, TrialError] = {}
        self._dropped: set[str] = set()
        self.not_reproduced: tuple[str, ...] = ()
        self.by_alignment: dict[str, tuple[str, ...]] = {}
        self.errors: dict[str, float] = {}
        self.unmeasured: dict[str, str] = {}

    @property
    def remaining(self) -> tuple[str, ...]:
        """The names of the candidates that may still be chosen."""
        return tuple(name for name in self.candidates if name not in self._failures and name not in self._dropped)

    def fail(self, name: str, failure: TrialError) -> None:
        """Remove a candidate because it failed.

        Raises:
            TrialError: no candidate is left; the error is that of the most promising one.
        """
        self._failures[name] = failure
        _LOG.info("candidate failed", name=name, reason=failure.reason.name, detail=failure.detail)
        self.note(name, failure.reason.sentence(failure.detail))
        if not self.remaining:
            raise next(self._failures[each] for each in self.candidates if each in self._failures)

    def settle(self, name: str, graph: bytes, parts: Sequence[CompiledPart]) -> None:
        """Record the outcome for a candidate's parts, and the graph in which a backend has only the faster ones."""
        candidate = self.candidates[name]
        left_before = (each for each in candidate.report.parts if not each.compiled)
        report = replace(candidate.report, parts=(*left_before, *parts))
        self.candidates[name] = replace(candidate, graph=graph, report=report)

    def drop(self, name: str, verdict: str) -> None:
        """Remove a candidate that did not fail."""
        self._dropped.add(name)
        self.note(name, verdict)

    def note(self, name: str, verdict: str, gain: Estimate | None = None) -> None:
        """Record the outcome of a candidate so far."""
        self._rows[name] = replace(self._rows[name], verdict=verdict, gain=gain)

    def report(self, name: str | None = None) -> Report:
        """Return what the passes did for a candidate, or else for the most promising one, and the outcomes of all."""
        candidate = self.candidates[name or next(iter(self.candidates))]
        rows = tuple(replace(each, verdict=each.verdict or "the trial ended before it") for each in self._rows.values())
        rows += candidate.report.candidates[1:]
        of_candidate = (*self.by_alignment.get(candidate.name, ()), self.unmeasured.get(candidate.name, ""))
        different = (*self.not_reproduced, *filter(None, of_candidate))
        return replace(
            candidate.report,
            candidates=rows,
            not_reproduced=different,
            max_relative_error=self.errors.get(candidate.name),
        )
