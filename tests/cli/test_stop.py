"""The word to end."""

from __future__ import annotations

import os
import signal
from threading import Timer

from fxlib.cli.serve import Stop


def test_a_signal_ends_a_wait() -> None:
    stop = Stop()
    before = signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    try:
        Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert stop.wait(60.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert stop.is_set
    assert stop.wait(60.0)


def test_a_wait_ends_untold() -> None:
    stop = Stop()
    assert not stop.wait(0.01)
    assert not stop.is_set
