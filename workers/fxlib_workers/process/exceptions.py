"""Exceptions that cross a process boundary as text, since their types may not be known on the other side."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

HOST_FAULTS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
"""The numbers of the errors of a failing disk, or of a host without room, for which no job is at fault."""

_LONGEST: Final = 500
"""The longest text of an exception, in characters."""

_OUT_OF_MEMORY: Final = ("can't allocate memory", "not enough memory", "bad_alloc", "MemoryError", "OutOfMemoryError")


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception from another process.

    Attributes:
        text: the exception's type and message.
        out_of_memory: whether an allocation failed.
        stranded: whether other trainers are waiting in a collective for the one that raised.
    """

    text: str
    out_of_memory: bool
    stranded: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describe an exception."""
        text = f"{type(error).__name__}: {error}"
        return cls(text=shorten(text), out_of_memory=any(sign in text for sign in _OUT_OF_MEMORY))


def returns_exceptions(method: Callable[P, R]) -> Callable[P, R | Raised]:
    """Make a method that runs the user's code return a `Raised` instead of raising."""

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | Raised:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the user's model raises is the trial's result
            return Raised.of(error)

    return wrapper


def shorten(text: str) -> str:
    """Return a message on one line, without a traceback and truncated to 500 characters."""
    lines = " ".join(filter(None, (line.strip() for line in text.partition("Traceback (most")[0].splitlines())))
    return lines if len(lines) <= _LONGEST else f"{lines[:_LONGEST]} ..."
