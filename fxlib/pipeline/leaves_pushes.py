"""Leave the pushes of a step in flight across its end: who settles them, and where an exception of one is raised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import RLock, get_ident

from fxlib.pipeline.request import Request
from fxlib.pipeline.watch import WATCH, works_for_others
from fxlib.runtime.ahead import note_step
from fxlib.runtime.gradients.pushes import PushesInFlight
from fxlib.runtime.ops.timeline import current_recording


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """Pushes in flight, the number of their step, and their writes as a watch knows them."""

    pushes: PushesInFlight
    step: int
    writes: Sequence[object]


class LeavesPushes(ABC):
    """The part of `ModuleAhead` that leaves the pushes of a step in flight until the program could notice."""

    def __init__(self) -> None:
        self._leaving = 0
        """Number of open pipelines that leave pushes in flight."""
        self._batches = 0
        """Number of batches of the loop that began last whose step is over."""
        self._left: _Left | None = None
        """The pushes that were sent and not waited for."""
        self._unraised: Exception | None = None
        """The exception of a push that was left in flight, if it could not be raised yet."""
        self._others_writes: list[object] = []
        """The writes that were in flight before the pushes of this step."""
        self._pushing: int | None = None
        """The thread that makes the pushes of a step; None while none does."""
        self._making: int | None = None
        """The thread that makes this object's own calls; None while none does."""
        self._prepared = set[Request]()
        """The requests that know the pushes of this step."""
        self._settling = RLock()
        self._preparing = RLock()
        """Held by a thread while it prepares requests for pushes, makes them, or gives them to a forward."""

    @abstractmethod
    def drop(self) -> None:
        """Forget all results that were fetched, since the servers may hold other values."""

    @abstractmethod
    def pushing(self) -> None:
        """Update rows that were read ahead as the servers update them, while pushes are in flight."""

    @abstractmethod
    def _step_pushed(self) -> None:
        """Note that the pushes of a step were made."""

    @property
    @abstractmethod
    def _several_trainers(self) -> bool:
        """Whether other processes also write to the servers, in an order that this one does not see."""

    @abstractmethod
    def _waiting(self) -> Iterable[Request]:
        """Return all requests that no forward has taken."""

    @property
    def _others_push(self) -> bool:
        """Whether another thread makes the pushes of a step."""
        return self._pushing is not None and self._pushing != get_ident()

    @property
    def may_leave_pushes(self) -> bool:
        """Whether `push_gradients` may return before its pushes are answered.

        With several trainers it may not, since the others' pushes are ordered with them.
        """
        return self._leaving > 0 and not self._several_trainers

    def left(self, pushes: PushesInFlight) -> None:
        """Note that the pushes of a step were sent; `settle_pushes` will wait for them.

        Raises:
            Exception: whatever a push raises that another thread has left in flight meanwhile, with a note that names
                its step.
        """
        self.pushing()
        with self._preparing:
            earlier = self._left
            self._pushing = self._pushing if self._others_push else None
            writes = [each for each in WATCH.in_flight if each not in self._others_writes]
            self._left = _Left(pushes=pushes, step=self._batches + 1, writes=writes)
            self._step_pushed()
        if earlier is not None:
            self._finish(earlier)

    def _finish(self, left: _Left) -> None:
        try:
            left.pushes.finish(current_recording())
        except BaseException as error:
            note_step(error, left.step)
            self.drop()
            raise

    def settle_pushes(self) -> None:
        """Wait for pushes that were left in flight; while one thread waits for them, they count as left for all others.

        Raises:
            Exception: whatever one of them raises, with a note that names its step.
        """
        if (self._left is None and self._unraised is None) or self._pushing == get_ident():
            return
        with self._settling:
            unraised, self._unraised = self._unraised, None
            if unraised is not None:
                raise unraised
            left = self._left
            if left is None:
                return
            self._pushing = get_ident()
            try:
                self._finish(left)
            finally:
                for each in self._waiting():
                    each.rides = False
                self._prepared.clear()
                self._left = self._pushing = None

    def calls(self) -> None:
        """Settle pushes in flight, before this process makes any remote call other than pushes and calls ahead."""
        if self._left is None or get_ident() in (self._making, self._pushing):
            return
        if self._pushing is None or not works_for_others():
            self.settle_pushes()
