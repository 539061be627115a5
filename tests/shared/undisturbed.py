"""What is so on any machine, and may not show at once while the machine has much else to do."""

import time
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


def until(true: Callable[[], bool]) -> None:
    """Wait for what must come true, even if the machine has much else to do."""
    end = time.monotonic() + 200
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
