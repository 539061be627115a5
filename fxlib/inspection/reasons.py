"""Why nothing is known of a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Why(Enum):
    """A reason, with its sentence; `{}` stands for the detail."""

    REMOTE = "neither a contract's returns= nor a profile tells what {} returns"
    OPAQUE = "it runs code that may do anything ({}), and nothing is run"
    VALUES = "what it makes depends on the values of tensors ({})"
    UNSUPPORTED = "torch cannot follow it without values ({})"
    INPUT = "nothing is known of its input {}"

    def sentence(self, detail: str) -> str:
        """Return the reason in words."""
        return self.value.format(detail)


@dataclass(frozen=True, slots=True)
class Unknown:
    """In the place of a value that nothing is known of."""

    why: Why
    detail: str

    def __str__(self) -> str:
        """Return why."""
        return self.why.sentence(self.detail)
