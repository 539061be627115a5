"""Keep the answers of the last second, so that a question that many visitors ask at once is looked up once."""

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
        """Forget all answers, including those that are being looked up."""
        with self._lock:
            self._known.clear()
            self._generation += 1

    def get(self, key: Hashable, ask: Callable[[], T]) -> T:
        """Return the answer to a question, which is asked now unless there is a recent answer."""
        with self._lock:
            at, known = self._known.get(key, (float("-inf"), None))
            generation = self._generation
        if time.monotonic() - at < _RECENT_S:
            recent: T = known
            return recent
        answer = ask()
        with self._lock:
            if generation == self._generation:
                self._known[key] = time.monotonic(), answer
                self._known.move_to_end(key)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return answer
