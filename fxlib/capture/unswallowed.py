"""Errors of a capture that the program under capture cannot swallow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fxlib.capture import source
from fxlib.errors import CaptureError

_thread = threading.local()


def capture_error(problem: str, *, hint: str, where: str = "") -> CaptureError:
    """Make the error to be raised; `where` is by default the user's statement that is running.

    It is noted, too: an `except` of the user's might catch it, and the program would go on as it never does in a run.
    """
    error = CaptureError(problem, where=where or source.here(), hint=hint)
    getattr(_thread, "faults", []).append(error)
    return error


@contextmanager
def unswallowed() -> Iterator[None]:
    """Raise the first fault of the block, even if the block caught it.

    Raises:
        CaptureError: there was one.
    """
    faults: list[CaptureError] = []
    _thread.faults = faults
    try:
        yield
    except Exception as error:
        if faults and error is not faults[0]:
            raise faults[0] from error
        raise
    finally:
        del _thread.faults
    if faults:
        raise faults[0]
