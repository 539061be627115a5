"""Answers of the last second: what many visitors ask at once is looked up once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

T = TypeVar("T")

_RECENT_S: Final = 1.0
_REMEMBERED: Final = 100


class Recent:
    """Answers of the last second, by their questions; all threads share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._generation = 0

    def forget(self) -> None:
        """Forget all answers, also those that are on their way."""
        with self._lock:
            self._known.clear()
            self._generation += 1

    def get(self, key: Hashable, ask: Callable[[], T]) -> T:
        """Return the answer to a question, asked now unless it was a moment ago."""
        with self._lock:
            at, known = self._known.get(key, (float("-inf"), None))
            generation = self._generation
        if time.monotonic() - at < _RECENT_S:
            told: T = known
            return told
        answer = ask()
        with self._lock:
            if generation == self._generation:
                self._known[key] = time.monotonic(), answer
                self._known.move_to_end(key)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return answer
