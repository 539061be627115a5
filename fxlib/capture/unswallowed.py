"""Errors that end a capture even where the program that is captured catches them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fxlib.capture import source
from fxlib.errors import CaptureError

_thread = threading.local()


def capture_error(problem: str, *, hint: str, where: str = "") -> CaptureError:
    """Return the error to raise; `where` is by default the user's statement that is running.

    The error is also noted, because an `except` of the user's may catch it: the forward would then go on in a way in
    which it never runs.
    """
    error = CaptureError(problem, where=where or source.here(), hint=hint)
    getattr(_thread, "errors", []).append(error)
    return error


@contextmanager
def unswallowed() -> Iterator[None]:
    """Raise the first error that `capture_error` made in the block, even if the block caught it.

    Raises:
        CaptureError: there was such an error.
    """
    errors: list[CaptureError] = []
    _thread.errors = errors
    try:
        yield
    except Exception as error:
        if errors and error is not errors[0]:
            raise errors[0] from error
        raise
    finally:
        del _thread.errors
    if errors:
        raise errors[0]
