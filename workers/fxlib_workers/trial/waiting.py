"""How long the thread that runs the steps of a trial waits for a core: others have it then, whoever they are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

NOTEWORTHY: Final = 0.1
"""Share of the measured time from which on it is told."""

_OWN: Final = Path("/proc/thread-self/schedstat")


def waited_s(schedstat: Path = _OWN) -> float:
    """Return the seconds for which this thread has stood in a queue for a core; 0 where the kernel does not tell."""
    try:
        _, nanoseconds, _ = schedstat.read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(nanoseconds) / 1e9


def note_of(share: float) -> tuple[str, ...]:
    """Say, where it is worth a word, that a trainer waited for so large a share of the measured time."""
    if share < NOTEWORTHY:
        return ()
    told = f"cores were shared: a trainer waited for one in {share:.0%} of the measured time"
    return (f"{told}, so the gain may be another on a machine of its own",)
