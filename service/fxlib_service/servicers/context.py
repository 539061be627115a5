"""The part of gRPC's call context that servicers use; None in tests without a network."""

from __future__ import annotations

from typing import Protocol


class CallContext(Protocol):
    """What a servicer may ask about a call."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline, None if there is none."""


Context = CallContext | None


def seconds_left(context: Context, otherwise: float) -> float:
    """Return the seconds until the caller's deadline, at most `otherwise`."""
    remaining = context.time_remaining() if context is not None else None
    return otherwise if remaining is None else min(otherwise, remaining)
