"""Keep the answers of the last second, so that a question that many visitors ask at once is looked up once."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

T = TypeVar("T")

_RECENT_S: Final = 1.0
_REMEMBERED: Final = 100


class Recent:
    """Answers of the last second, and those that are being looked up, by their questions; all threads share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Hashable, tuple[float, Future[Any]]] = OrderedDict()
        """When each answer came, on the monotonic clock (inf while it is being looked up), and the answer."""

    def forget(self) -> None:
        """Forget all answers, including those that are being looked up."""
        with self._lock:
            self._known.clear()

    def get(self, key: Hashable, ask: Callable[[], T]) -> T:
        """Return the answer to a question, which is asked now unless there is a recent answer, or will be one.

        If asking fails, all who wait for the answer get the exception, and whoever comes next asks again.
        """
        with self._lock:
            at, answer = self._known.get(key, (-math.inf, Future[T]()))
            asks = time.monotonic() - at >= _RECENT_S
            if asks:
                answer = Future[T]()
                self._known[key] = math.inf, answer
                self._known.move_to_end(key)
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        if asks:
            try:
                answer.set_result(ask())
            except BaseException as error:  # noqa: BLE001 - it is raised below, and where others wait
                answer.set_exception(error)
            with self._lock:
                if self._known.get(key) == (math.inf, answer):  # nobody has forgotten it
                    self._known[key] = (time.monotonic() if answer.exception() is None else -math.inf), answer
        return answer.result()
