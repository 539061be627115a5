"""Exceptions that cross a process boundary in words: their types may not be known on the other side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST: Final = 500
_OUT_OF_MEMORY: Final = ("can't allocate memory", "not enough memory", "bad_alloc", "MemoryError", "OutOfMemoryError")


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
