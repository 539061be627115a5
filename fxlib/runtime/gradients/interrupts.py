"""Putting interrupts off while something is done that is to be done whole, or not at all."""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_signal  # what signal.signal calls, which makes enums of numbers, at half the cost
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run the block to its end, and only then what came meanwhile: a Ctrl-C raises KeyboardInterrupt behind it.

    Python runs handlers of signals in the main thread alone: in others, there is nothing to put off. Handlers that are
    not Python's, such as the system's default of SIGTERM, act at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    handlers: dict[signal.Signals, Any] = {}
    try:
        for number in _SIGNALS:
            if callable(handler := getsignal(number)):
                handlers[number] = handler
                set_signal(number, note)
        yield
    finally:
        for number, handler in reversed(handlers.items()):  # SIGINT last: its handler may raise from here on
            set_signal(number, handler)
        for received, frame in came:
            handlers[signal.Signals(received)](received, frame)
