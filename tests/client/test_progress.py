"""Progress is a moving line on a terminal, and plain lines elsewhere."""

import io
from datetime import UTC, datetime

from fxlib.client.progress import display
from fxlib.jobs import Event


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def event(message: str, progress: float | None = None) -> Event:
    return Event(sequence=1, at=datetime.now(UTC), state="running", phase="qps", message=message, progress=progress)


def test_a_log_gets_one_plain_line_for_each_new_message() -> None:
    log = io.StringIO()
    with display(log) as shown:
        shown.say("sending the graph")
        for progress in (0.1, 0.2, 0.3):
            shown.show(event("measuring", progress))
    assert log.getvalue() == "fxlib: sending the graph\nfxlib: qps: measuring\n"


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
    with display(io.StringIO()) as shown:
        shown._stream = log  # type: ignore[attr-defined]
        shown.say("anything")
