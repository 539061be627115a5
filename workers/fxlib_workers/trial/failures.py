"""How a trial ends early: with a reason of the catalogue, which becomes the job's answer, or because it was told to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from fxlib.reasons import Reason
from fxlib_workers.trial.selection.arms import Arm

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST: Final = 500
_OUT_OF_MEMORY: Final = ("can't allocate memory", "not enough memory", "bad_alloc", "MemoryError", "OutOfMemoryError")


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


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception in a process of the trial, in words: its type may not be known elsewhere.

    Attributes:
        stranded: other trainers wait, in a collective, for the one that raised.
    """

    text: str
    out_of_memory: bool
    stranded: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describe an exception."""
        text = f"{type(error).__name__}: {error}"
        return cls(text=shorten(text), out_of_memory=any(sign in text for sign in _OUT_OF_MEMORY))


def tells(method: Callable[P, R]) -> Callable[P, R | Raised]:
    """Have a method return, in words, what it would raise: for code that is the user's."""

    @functools.wraps(method)
    def told(*args: P.args, **kwargs: P.kwargs) -> R | Raised:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the user's model raises is the trial's result
            return Raised.of(error)

    return told


def shorten(text: str) -> str:
    """Return the first lines of a message, on one line."""
    lines = " ".join(filter(None, (line.strip() for line in text.partition("Traceback (most")[0].splitlines())))
    return lines if len(lines) <= _LONGEST else f"{lines[:_LONGEST]} ..."
