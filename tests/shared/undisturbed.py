"""Measurements of what is so on any machine, and may not show while the machine has much else to do."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def undisturbed(measure: Callable[[], T], shows: Callable[[T], bool], attempts: int = 5) -> T:
    """Measure until it shows, so many times at most, and return what was measured last."""
    found = measure()
    for _ in range(attempts - 1):
        if shows(found):
            break
        found = measure()
    return found
