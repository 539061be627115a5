"""Checks for tests of the pool, which calls them in processes of its own. Each leaves a line in a file."""

import os
import signal
import time
from pathlib import Path

from fxlib_service.errors import ServiceError, invalid


def note(path: Path, line: str = "checked") -> int:
    with path.open("a") as file:
        file.write(f"{line}\n")
    return os.getpid()


def refuse(path: Path) -> ServiceError:
    note(path)
    raise invalid("graph", "is not one")


def fail() -> None:
    raise ZeroDivisionError


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(path: Path, begun: Path, line: str = "checked") -> None:
    """Note that it has begun, and end when the file is there."""
    note(begun, line)
    while not path.exists():
        time.sleep(0.01)


def allocate(size: int) -> int:
    """Take memory, none of which is touched, and return how much it was."""
    return len(bytearray(size))
