"""Pushes of a step that stay in flight across it: who settles them, and where what one of them raises is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock, get_ident

from fxlib.pipeline.request import Request
from fxlib.pipeline.watch import WATCH
from fxlib.runtime.gradients.pushes import PushesInFlight
from fxlib.runtime.ops.record import current_recording


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """Pushes in flight of a step, by its number, and what they write, as a watch has it."""

    pushes: PushesInFlight
    step: int
    writes: Sequence[object]


class LeavesPushes(ABC):
    """The half of what is ahead of a module that leaves the pushes of a step in flight, until anything could tell."""

    def __init__(self) -> None:
        self._leaving = 0
        """Number of open pipelines that leave pushes in flight."""
        self._batches = 0
        """Number of the loop's batches whose step is over."""
        self._left: _Left | None = None
        """The pushes that were sent and not waited for."""
        self._unraised: Exception | None = None
        """What such a push raised where nobody could be told."""
        self._others_writes: list[object] = []
        """The writes that were in flight before the pushes of this step."""
        self._pushing: int | None = None
        """The thread that makes the pushes of a step; None while none does."""
        self._making: int | None = None
        """The thread that makes calls of its own; None while none does."""
        self._settling = RLock()

    @abstractmethod
    def drop(self) -> None:
        """Forget all that was fetched: the servers may hold other values."""

    @abstractmethod
    def pushing(self) -> None:
        """Update rows that were read ahead as the servers update them, while pushes are under way."""

    @abstractmethod
    def _step_pushed(self) -> None:
        """Note that the pushes of a step were made."""

    @property
    @abstractmethod
    def _several_trainers(self) -> bool:
        """Whether other processes write to the servers, too, in an order that this one does not see."""

    @abstractmethod
    def _waiting(self) -> Iterable[Request]:
        """Return all requests that no forward has taken."""

    @property
    def may_leave_pushes(self) -> bool:
        """Whether `push_gradients` may return before pushes were answered; other trainers' are ordered with them."""
        return self._leaving > 0 and not self._several_trainers

    def left(self, pushes: PushesInFlight) -> None:
        """Note that the pushes of a step were sent, and will be waited for by `settle_pushes`."""
        self.pushing()
        self._pushing = None
        writes = [each for each in WATCH.in_flight if each not in self._others_writes]
        self._left = _Left(pushes=pushes, step=self._batches + 1, writes=writes)
        self._step_pushed()

    def settle_pushes(self) -> None:
        """Wait for pushes that were left in flight.

        Raises:
            Exception: what one of them raises, with a note that names its step.
        """
        if self._left is None and self._unraised is None:
            return
        with self._settling:
            unraised, self._unraised = self._unraised, None
            if unraised is not None:
                raise unraised
            left, self._left = self._left, None
            if left is None:
                return
            self._pushing = get_ident()
            try:
                left.pushes.finish(current_recording())
            except BaseException as error:
                error.add_note(f"fxlib.pipeline: a push of step {left.step} of the loop, which was left in flight")
                self.drop()
                raise
            finally:
                self._pushing = None
                for each in self._waiting():
                    each.rides = False

    def calls(self) -> None:
        """Settle pushes in flight, before this process makes a remote call that is none of these, and none ahead."""
        if self._left is not None and self._making != get_ident() and self._pushing != get_ident():
            self.settle_pushes()

    @contextmanager
    def _own_calls(self) -> Iterator[None]:
        """Make calls beside which pushes may be in flight."""
        self._making = get_ident()
        try:
            yield
        finally:
            self._making = None
