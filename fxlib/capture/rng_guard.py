"""Refuse a forward that draws random numbers from Python or NumPy while it is captured."""

from __future__ import annotations

import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fxlib.capture import source
from fxlib.errors import CaptureError


@contextmanager
def generators_unused(forward: object) -> Iterator[None]:
    """Refuse a block that draws from the random generators of Python or NumPy: each run would see the same numbers.

    The generators are put back, unless other threads run, which may have drawn numbers as well.

    Raises:
        CaptureError: a generator was drawn from.
    """
    before = [(name, read, put, read()) for name, read, put in _generators()]
    drawn = ""
    try:
        yield
    finally:
        for name, read, put, state in before:
            if not _same(state, read()):
                drawn = name
                if threading.active_count() == 1:
                    put(state)
    if drawn:
        raise CaptureError(
            f"{drawn} was drawn from while the forward was traced, and a graph would see the same numbers at every run",
            where=source.of_definition(forward),
            hint="Draw with torch (torch.rand), or before the forward. If another thread drew, capture before it runs.",
        )


def _generators() -> list[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    found: list[tuple[str, Callable[[], Any], Callable[[Any], None]]] = [
        ("Python's random generator", random.getstate, random.setstate)
    ]
    if "numpy" in sys.modules:
        numpy_random = importlib.import_module("numpy.random")  # which NumPy imports at its first use
        found.append(("NumPy's random generator", numpy_random.get_state, numpy_random.set_state))
    return found


def _same(state: Any, other: Any) -> bool:
    return all(map(_same_part, state, other))


def _same_part(part: Any, other: Any) -> bool:
    equal = part == other
    return equal if isinstance(equal, bool) else bool(equal.all())
