"""The gradients that a module's forwards leave behind: remembered until the program pushes them."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

from fxlib.runtime.early import EarlyPushes, Forward
from fxlib.runtime.fans import Fans
from fxlib.runtime.flight import Tracked
from fxlib.runtime.pushes import Push

UNPUSHED_FORWARDS = 256
"""Forwards whose gradients are kept for a program that has never pushed any."""


class Tape:
    """Remote results of past forwards whose gradients are still to be pushed, oldest first.

    What can no longer receive a gradient (an evaluation, a forward without backward) is forgotten at the next forward.
    A program that pushes may accumulate over as many forwards as it likes. One that has never pushed keeps the last
    `UNPUSHED_FORWARDS`, and is warned when it loses more, so that memory stays bounded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forwards: deque[Forward] = deque()
        self._pushes = False
        self._early = EarlyPushes()
        self.untracked = ""
        """Why a forward since the last push tracked no gradients though it should have; empty if none did."""

    def __len__(self) -> int:
        return len(self._forwards)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tape:
        return Tape()  # the leaves belong to forwards of the module that was copied

    def begin(self) -> None:
        """To be called before each forward.

        Raises:
            FxlibError: gradients of the forward before it were sent from inside backward, and never pushed.
        """
        self._early.begin()

    def fans(self) -> Fans:
        """Return what the results of the forward that is about to run are spread from."""
        return Fans(self._early.kin)

    def add(self, tracked: Sequence[Tracked]) -> None:
        """Append one forward, which has just ended."""
        forward = Forward.of(tracked)
        with self._lock:
            while self._forwards and self._forwards[-1].dead:
                self._forwards.pop()
            self._forwards.append(forward)
            alone = len(self._forwards) == 1
            lost = not self._pushes and len(self._forwards) > UNPUSHED_FORWARDS
            if lost:
                self._forwards.popleft()
        if lost:
            _warn_of_loss()
        self._early.watch(forward, alone=alone)

    def take(self) -> list[Push]:
        """Return all that is to be pushed, forward by forward, in program order, and forget it."""
        self._early.close()
        with self._lock:
            self._pushes = True
            forwards, self._forwards, self.untracked = self._forwards, deque(), ""
        return [push for forward in forwards for push in forward.pushes]


def _warn_of_loss() -> None:
    warnings.warn(
        f"gradients of remote results older than {UNPUSHED_FORWARDS} forwards are dropped: "
        "nothing pushes them. Call fxlib.push_gradients(module) after backward, or run the forward in torch.no_grad().",
        RuntimeWarning,
        stacklevel=2,
    )
