"""Gradients on their way to servers, message by message, in program order.

Nobody waits for them where they are sent, inside backward. What one message answers decides whether the next is sent,
so whoever learns of the answer first sends it: the RPC layer's thread, or the program that waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxlib import batch
from fxlib.errors import FxlibError
from fxlib.runtime.pushes import Parcel, Push, Raised, parcels_of
from fxlib.runtime.record import Recording
from fxlib.runtime.underway import UNDERWAY


class Convoy:
    """Pushes that are under way, each message sent when the one before it has succeeded.

    Neighbours to one server whose contracts let them be batched travel in one message. At the first failure the rest
    stays behind.

    Args:
        pushes: in program order, each with its gradient.
        recording: of the step that they belong to, if it is recorded.
    """

    def __init__(self, pushes: Sequence[Push], recording: Recording | None) -> None:
        self._to_come = deque(parcels_of(pushes))
        self._servers = {push.server for push in pushes}
        self._recording = recording
        self._lock = threading.RLock()
        self._outcomes: dict[Push, Any] = {}
        self._under_way: Parcel | None = None
        self._landings: list[Callable[[], None]] = []
        self._failed = False

    def start(self) -> None:
        """Send the first message. Never blocks and never raises."""
        for server in self._servers:
            UNDERWAY.depart(server, self)
        with self._lock:
            self._send_next()

    def result(self, push: Push) -> None:
        """Block until a push is over, which those before it were, well.

        Raises:
            FxlibError: sending it was interrupted.
            Exception: what the push raised.
        """
        while push not in self._outcomes and (parcel := self._under_way) is not None:
            self._await(parcel)
        if push not in self._outcomes:
            raise FxlibError(
                "sending the gradient was interrupted, and nobody knows whether it has arrived",
                where=push.call.gradient,
                hint="Go on from a checkpoint, or without this step's gradient.",
            )
        outcome = self._outcomes[push]
        if isinstance(outcome, Raised):
            raise outcome.error
        batch.result(outcome)

    def settle(self) -> None:
        """Block until all is over, well or not; after an interrupt within `start` nothing is under way."""
        while (parcel := self._under_way) is not None:
            self._await(parcel)
        for server in self._servers:
            UNDERWAY.arrive(server, self)

    def _await(self, parcel: Parcel) -> None:
        with contextlib.suppress(Exception):  # kept as the outcome
            parcel.future.wait()
        self._landed(parcel)

    def _send_next(self) -> None:
        parcel: Parcel | None = None
        while parcel is None and self._to_come and not self._failed:
            pushes = self._to_come.popleft()
            try:
                self._landings = self._take_off(pushes)
                parcel = Parcel(pushes)
            except Exception as error:  # noqa: BLE001 - whatever it is, the program's push raises it
                self._not_sent(pushes, error)
        # At no moment is there nothing under way while there is something to come: who waits would stop waiting.
        self._under_way = parcel
        if parcel is not None:
            # Where nothing depends on the answer but who waits for it, no thread shall wake up to take it.
            if self._to_come or self._landings:
                sent = parcel
                sent.future.add_done_callback(lambda _: self._landed(sent))
            return
        for server in self._servers:
            UNDERWAY.arrive(server, self)

    def _take_off(self, pushes: Sequence[Push]) -> list[Callable[[], None]]:
        recording = self._recording
        return [] if recording is None else [recording.take_off(each.call.gradient, each.server) for each in pushes]

    def _not_sent(self, pushes: Sequence[Push], error: Exception) -> None:
        if len(pushes) > 1:  # one of them is to blame, and those before it are not
            self._to_come.extendleft([push] for push in reversed(pushes))
            return
        self._outcomes[pushes[0]] = Raised(error)
        self._failed = True

    def _landed(self, parcel: Parcel) -> None:
        with self._lock:
            if parcel is not self._under_way:
                return
            for landing in self._landings:
                landing()
            if outcomes := parcel.outcomes():
                self._note(parcel, outcomes)
            else:
                self._to_come.extendleft([push] for push in reversed(parcel.pushes))
            self._send_next()

    def _note(self, parcel: Parcel, outcomes: Mapping[Push, Any]) -> None:
        self._outcomes |= outcomes
        self._failed = len(outcomes) < len(parcel.pushes) or True in map(_is_failure, outcomes.values())
        for push in parcel.pushes:
            push.gradient = None


def _is_failure(outcome: Any) -> bool:
    return isinstance(outcome, Raised) or batch.failed(outcome)
