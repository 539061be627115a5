"""How a job's progress is passed on, from the process that makes it to the job's history."""

from __future__ import annotations

from typing import Protocol


class Tell(Protocol):
    """Passes progress on: the phase, a line for people, and the share done (None: unknown).

    A trial's phases are "profile", "sameness", "choice" and "qps".
    """

    def __call__(self, phase: str, message: str, progress: float | None = None, /) -> None:
        """Pass it on."""
