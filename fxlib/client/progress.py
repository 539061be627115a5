"""Show the progress of a job: a moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol, Self, TextIO

from fxlib.spec.job import TERMINAL, Event
from fxlib.utils.text import plain


class Progress(Protocol):
    """Shows the progress of a job while a launcher waits for it."""

    def say(self, text: str) -> None:
        """Show what the client itself does."""

    def show(self, event: Event) -> None:
        """Show what the service reports."""


class Silent:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def show(self, event: Event) -> None:
        """Show nothing."""


class Lines:
    """One plain line for each new phase, and one now and then within a phase: for logs."""

    def __init__(self, stream: TextIO, *, every_s: float = 10.0) -> None:
        self._stream, self._every_s = stream, every_s
        self._last, self._phase, self._next_s = "", "", 0.0

    def say(self, text: str) -> None:
        """Write a line, unless it is the last one again."""
        text = plain(text)
        if text != self._last:
            self._last = text
            # A log that is closed or full is no reason to stop training.
            with contextlib.suppress(OSError, ValueError):
                print(f"fxlib: {text}", file=self._stream, flush=True)

    def show(self, event: Event) -> None:
        """Write phase and message, unless the same phase had a line a short while ago."""
        now_s = time.monotonic()
        if event.phase != self._phase or event.state in TERMINAL or now_s >= self._next_s:
            self._phase, self._next_s = event.phase, now_s + self._every_s
            self.say(sentence(event))


class Terminal:
    """A spinner, a bar for the present phase, and the time passed; gone when the job is done."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("fxlib: {task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._bars.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Show a sentence, and no figure."""
        self._bars.update(self._task, description=plain(text), total=None)

    def show(self, event: Event) -> None:
        """Show phase, message and bar."""
        known, text = event.progress is not None, plain(sentence(event))
        self._bars.update(self._task, description=text, total=1.0 if known else None, completed=event.progress or 0.0)


def sentence(event: Event) -> str:
    """Write phase (or state) and message as one line."""
    phase = event.phase or event.state
    return f"{phase}: {event.message}" if event.message and event.message != phase else phase


@contextlib.contextmanager
def display(stream: TextIO | None = None) -> Iterator[Progress]:
    """Show progress on `stream` (standard error by default) in the way that suits it."""
    stream = sys.stderr if stream is None else stream
    if stream is None or not stream.isatty():
        yield Lines(stream) if stream is not None else Silent()
        return
    with Terminal(stream) as terminal:
        yield terminal
