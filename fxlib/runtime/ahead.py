"""The interface of a captured module to calls made ahead of its forward, which `fxlib.pipeline` makes and keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fxlib import batch

_LEFT = "fxlib.pipeline: a push of step"


def note_step(error: BaseException, step: int) -> None:
    """Note on the error of a push that a loop has left in flight which step of the loop it is of."""
    error.add_note(f"{_LEFT} {step} of the loop, which was left in flight")


def was_left(error: BaseException) -> bool:
    """Return whether an error is that of a push left in flight, and not of the call before which it was raised."""
    return any(each.startswith(_LEFT) for each in getattr(error, "__notes__", ()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rider:
    """Reads of the next step that travel in the message of this step's pushes to one server, and run after them."""

    server: str
    call: batch.Call
    timeout_s: float
    """Time limit of the reads, in seconds; 0 is no limit."""
    deliver: Callable[[Any], None]
    """The function that takes the outcome of `call`, or None if the reads were not made or not answered."""


class Ahead(Protocol):
    """The calls that were made ahead for one module."""

    def over(
        self, module: Any, generated: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return a forward in which results that were fetched for these very arguments stand for calls.

        Args:
            module: the captured module whose graph runs.
            generated: its forward, which is returned as it is if nothing was fetched.
            args: positional arguments of the forward.
            kwargs: keyword arguments of the forward.
        """

    def passed_over(self, *, grad_enabled: bool) -> None:
        """Note that the original's forward runs, which takes nothing that was fetched.

        Args:
            grad_enabled: the grad mode of the caller.
        """

    def ended(self) -> None:
        """Note that the forward has ended, however it did."""

    def riders(self, pushes: Sequence[Any]) -> Sequence[Rider]:
        """Return the reads that may travel with the pushes that are made next.

        Args:
            pushes: the pushes, as `fxlib.runtime.gradients.pushes` describes them.
        """

    def pushing(self) -> None:
        """Do the work that can be done while pushes are under way; this never raises."""

    @property
    def may_leave_pushes(self) -> bool:
        """Whether `push_gradients` may return before pushes were answered."""

    def left(self, pushes: Any) -> None:
        """Note that the pushes of a step were sent, and that `settle_pushes` will wait for them.

        Args:
            pushes: the pushes, as `fxlib.runtime.gradients.pushes.PushesInFlight`.
        """

    def settle_pushes(self) -> None:
        """Wait for pushes that were left in flight.

        Raises:
            Exception: what one of them raises, with a note that names its step.
        """

    def pushed(self) -> None:
        """Note that the pushes of a step were made, and make the reads that had to come after them."""

    def settle(self) -> None:
        """Wait for everything in flight, and forget it: another graph runs from now on."""

    def drop(self) -> None:
        """Forget everything that was fetched: the servers may hold other values by now."""
