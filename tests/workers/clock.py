"""A clock that tests set, for code that measures time and observes deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Clock:
    """Stands in for the module `time`."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@contextmanager
def shown_to(clock: Clock, *modules: str) -> Iterator[None]:
    """Have these modules look at it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(f"{module}.time", clock)
        yield
