"""What a schedule may have in flight at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Hard limits; None is no limit. A single message larger than a limit goes alone."""

    memory_bytes: int | None = None
    """Memory of values held at once, above what the program holds in the order in which it was written."""
    calls_in_flight: int | None = None
    """Messages under way to each destination."""
    bytes_in_flight: int | None = None
    """Arguments and results of what is under way to each destination."""

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return any(each is not None for each in (self.memory_bytes, self.calls_in_flight, self.bytes_in_flight))

    @property
    def of_flight(self) -> bool:
        """Whether a limit holds for each destination, which the runtime enforces too."""
        return self.calls_in_flight is not None or self.bytes_in_flight is not None


UNLIMITED = Limits()
