"""How a trial ends early: with a reason of the catalogue, which becomes the job's answer, or because it was told to."""

from __future__ import annotations

from fxlib.reasons import Reason
from fxlib_workers.exchange.candidate import MOVED, ORIGINAL, Arm


class TrialError(Exception):
    """The trial cannot go on; the original is kept, for this reason. `survived`: its processes could go on."""

    def __init__(self, reason: Reason, detail: str, *, survived: bool = False) -> None:
        super().__init__(reason.sentence(detail))
        self.reason = reason
        self.detail = detail
        self.survived = survived


class CandidateError(TrialError):
    """One candidate failed; the trial can go on with others."""

    def __init__(self, arm: Arm, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail, survived=True)
        self.arm = arm


class InterruptedTrialError(Exception):
    """The worker does not want the trial any more."""


def fails(arm: Arm) -> Reason:
    """Return what an exception in an arm's own code means."""
    return Reason.ORIGINAL_FAILS if arm in (ORIGINAL, MOVED) else Reason.CANDIDATE_FAILS
