"""The word to end."""

from __future__ import annotations

import signal

from fxlib.cli.stop import Stop


def test_a_signal_ends_a_wait() -> None:
    stop = Stop()
    before = signal.signal(signal.SIGALRM, lambda *_: stop.tell())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert stop.wait(60.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stop.told
    assert stop.wait(60.0)


def test_a_wait_ends_untold() -> None:
    stop = Stop()
    assert not stop.wait(0.01)
    assert not stop.told
