"""The ways in which a trial ends early: for a reason that becomes the job's answer, or on request."""

from __future__ import annotations

import re
import signal
from typing import Final

from fxlib.reasons import Reason
from fxlib_workers.exchange import ORIGINAL, REALIGNED, Arm

_KILLED: Final = re.compile(rf"\(signal ({int(signal.SIGKILL)}|{int(signal.SIGTERM)})\)|node (died|was terminated)")
"""The texts that explain a death caused from outside. A program's own limits and crashes end it in other ways."""


class TrialError(Exception):
    """The trial cannot continue, and the original is kept.

    Attributes:
        reason: the reason in the job's answer.
        detail: the text that completes the reason's sentence.
        survived: whether the processes of the trial can run another program.
    """

    def __init__(self, reason: Reason, detail: str, *, survived: bool = False) -> None:
        super().__init__(reason.sentence(detail))
        self.reason = reason
        self.detail = detail
        self.survived = survived


class CandidateError(TrialError):
    """One candidate failed, and the trial can continue with the others.

    Attributes:
        candidate: the candidate's name.
    """

    def __init__(self, candidate: str, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail, survived=True)
        self.candidate = candidate


class LostCandidateError(TrialError):
    """One candidate failed and took processes of the trial with it; the others can be tried in new processes.

    Attributes:
        candidate: the candidate's name.
    """

    def __init__(self, candidate: str, error: TrialError) -> None:
        super().__init__(error.reason, error.detail)
        self.candidate = candidate


class InterruptedTrialError(Exception):
    """The worker asked the trial to end."""


def failure_reason(arm: Arm) -> Reason:
    """Return the reason for which a trial ends when an arm's own code raises."""
    return Reason.ORIGINAL_FAILS if arm in (ORIGINAL, REALIGNED) else Reason.CANDIDATE_FAILS


def came_from_outside(reason: Reason | None, explanation: str) -> bool:
    """Return whether a process of the trial was killed: by an operator, by the kernel, or with its node."""
    return reason is Reason.TRIAL_DIED and _KILLED.search(explanation) is not None
