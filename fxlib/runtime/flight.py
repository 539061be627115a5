"""One forward of a captured module, as the operators that run in it see it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxlib.runtime.fans import Arrival, Fans, Slot
from fxlib.runtime.structure import mapped

if TYPE_CHECKING:
    from fxlib.runtime.credits import Credits


@dataclass(slots=True, eq=False, kw_only=True)  # not frozen: that is slow to build, and a step builds many
class Tracked:
    """A remote result that takes a gradient, and the call that this gradient is to be sent with.

    `value` is the result with slots in place of the tensors that take a gradient; `index`, the call's place in program
    order; `early`: the gradient may leave from inside backward.
    """

    value: Any
    arrival: Arrival
    to: Any
    gradient: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout_s: float | None
    index: int
    early: bool = False

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has come that was not taken away."""
        return True in [slot.gradient is not None for slot in self.arrival.slots]  # sooner than `any`, and often asked

    @property
    def carries_graph(self) -> bool:
        """Whether a gradient that has come takes a gradient itself."""
        return True in [slot.gradient is not None and slot.gradient.requires_grad for slot in self.arrival.slots]

    @property
    def dead(self) -> bool:
        """Whether no gradient can arrive any more, and none is there."""
        return self.arrival.fan() is None and not self.has_gradient

    def gradient_of_result(self) -> Any:
        """Return what has come: of a tensor its gradient, of a structure one like it, None for what has no gradient."""
        value = self.value
        return value.gradient if type(value) is Slot else mapped(value, _gradient)

    def forget(self) -> None:
        """Let go of the gradient."""
        for slot in self.arrival.slots:
            slot.gradient = None


def _gradient(each: Any) -> torch.Tensor | None:
    return each.gradient if isinstance(each, Slot) else None


@dataclass(slots=True)
class Flight:
    """What operators note while one forward runs."""

    tracked: list[Tracked] = field(default_factory=list)
    refused: list[Exception] = field(default_factory=list)
    """Errors of calls that could not be issued, kept for their waits."""
    fans: Fans = field(default_factory=lambda: Fans({}))
    credits: Credits | None = None
    """What the forward may have in flight; None: anything."""


class _Thread(threading.local):
    flight: Flight | None = None


THREAD = _Thread()


def current_flight() -> Flight | None:
    """Return the forward that this thread runs, the innermost of nested ones."""
    return THREAD.flight
