"""What became of each candidate of a trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fxlib.spec.report import Candidate, Estimate, Report
from fxlib_workers.exchange.candidate import Arm, Draft
from fxlib_workers.trial.failures import TrialError


class Contest:
    """The candidates of a trial, the most promising first, and what became of each.

    Args:
        drafts: the candidates, at least one.

    Attributes:
        not_reproduced: what the original does not reproduce of itself.
        errors: how far the results of a candidate were from the original's, at most.
        unmeasured: what differs for a candidate that does not promise the same bits, by how much nobody knows.
    """

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.drafts: Mapping[Arm, Draft] = {draft.name: draft for draft in drafts}
        self._told: dict[Arm, Candidate] = {draft.name: draft.candidate for draft in drafts}
        self._failures: dict[Arm, TrialError] = {}
        self._left: set[Arm] = set()
        self.not_reproduced: tuple[str, ...] = ()
        self.errors: dict[Arm, float] = {}
        self.unmeasured: dict[Arm, str] = {}

    @property
    def standing(self) -> tuple[Arm, ...]:
        """The candidates that may still be chosen."""
        return tuple(arm for arm in self.drafts if arm not in self._failures and arm not in self._left)

    def fail(self, arm: Arm, failure: TrialError) -> None:
        """Take a candidate out, for this reason.

        Raises:
            TrialError: none is left to be chosen; it is the failure of the most promising one.
        """
        self._failures[arm] = failure
        self.tell(arm, failure.reason.sentence(failure.detail))
        if not self.standing:
            raise next(self._failures[each] for each in self.drafts if each in self._failures)

    def leave(self, arm: Arm, verdict: str) -> None:
        """Take a candidate out that did not fail."""
        self._left.add(arm)
        self.tell(arm, verdict)

    def tell(self, arm: Arm, verdict: str, gain: Estimate | None = None) -> None:
        """Say what has become of a candidate so far."""
        self._told[arm] = replace(self._told[arm], verdict=verdict, gain=gain)

    def report(self, arm: Arm | None = None) -> Report:
        """Return what the passes did for a candidate (else: for the most promising one), and what became of all."""
        draft = self.drafts[arm or next(iter(self.drafts))]
        told = tuple(replace(each, verdict=each.verdict or "the trial ended before it") for each in self._told.values())
        unequal = (*self.not_reproduced, *filter(None, [self.unmeasured.get(draft.name)]))
        return replace(
            draft.report, candidates=told, not_reproduced=unequal, max_relative_error=self.errors.get(draft.name)
        )
