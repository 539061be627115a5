"""The word to end, which a signal handler may give."""

from __future__ import annotations

import time

_POLL_S = 0.1


class Stop:
    """Whether this process was told to end.

    Not a `threading.Event`: a handler that sets one waits for a lock, which the very code that it interrupts may hold.
    """

    def __init__(self) -> None:
        """Begin untold."""
        self.told = False

    def tell(self) -> None:
        """Say it; from a signal handler, too."""
        self.told = True

    def wait(self, seconds: float) -> bool:
        """Wait until it is said, but no longer than so; return whether it was."""
        end = time.monotonic() + seconds
        while not self.told and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
        return self.told
