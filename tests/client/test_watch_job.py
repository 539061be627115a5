"""Progress is a moving line on a terminal, and plain lines elsewhere."""

import io
from dataclasses import replace
from datetime import UTC, datetime

from fxlib.client.watch_job import Lines, display
from fxlib.spec.job import Event


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def event(message: str, progress: float | None = None) -> Event:
    return Event(sequence=1, at=datetime.now(UTC), state="running", phase="qps", message=message, progress=progress)


def test_a_log_gets_a_plain_line_for_each_phase_and_not_for_each_message() -> None:
    log = io.StringIO()
    with display(log) as shown:
        shown.say("sending the graph")
        for number in range(3):
            shown.show(event(f"pair {number}"))
        shown.show(replace(event("adopted"), state="succeeded"))
    assert log.getvalue() == "fxlib: sending the graph\nfxlib: qps: pair 0\nfxlib: qps: adopted\n"


def test_a_long_phase_gets_a_line_now_and_then() -> None:
    log = io.StringIO()
    lines = Lines(log, every_s=0.0)
    for number in (1, 2, 2):
        lines.show(event(f"pair {number}"))
    assert log.getvalue() == "fxlib: qps: pair 1\nfxlib: qps: pair 2\n"


def test_a_terminal_gets_a_display_that_goes_away() -> None:
    terminal = FakeTerminal()
    with display(terminal) as shown:
        shown.say("sending the graph")
        shown.show(event("measuring [bold]block[/bold] 3", 0.5))
        shown.show(event("waiting"))
    assert "\x1b[" in terminal.getvalue()


def test_a_closed_log_stops_nothing() -> None:
    log = io.StringIO()
    log.close()
    Lines(log).say("anything")
