"""Functions that cache their results (`functools.lru_cache`): what a cache says is what a run would hear.

An answer that is there already is taken, and the entry is a fact. One that is not is traced, as the function would
compute it, and nothing of it is left in the cache; the first run is then the original's, which fills it. The graph runs
from then on if the cache was filled with what the capture computed. What a run would keep, and others could change or
draw anew (a tensor, a list, an object), is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fxlib.capture.recording.observers import entries_of, is_a
from fxlib.capture.recording.record import VALUES, Record
from fxlib.runtime.guards.capture_facts import Kind, Mark


class Memos:
    """The cached results that one capture has asked for."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._computed: dict[tuple[int, Any], Any] = {}

    def through(self, cache: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is to be called in place of `cache`, where `compute` traces a result."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            if any(is_a(each, VALUES) for each in (*args, *kwargs.values())):
                return compute(*args, **kwargs)  # of another tensor at each run
            entries, key = entries_of(cache), _key_of(cache, args, kwargs)
            if (found := dict.get(entries, key, Mark.ABSENT)) is not Mark.ABSENT:
                self._record.fact(Kind.ITEM, entries, key, found)
                result = cache(*args, **kwargs)
                self._record.see(result)
                return result
            fact = self._record.fact(Kind.MEMO, entries, key, None)
            place = id(cache), key
            if place not in self._computed:
                self._computed[place] = compute(*args, **kwargs)
            fact.value, fact.recall = self._computed[place], functools.partial(cache, *args, **kwargs)
            return self._computed[place]

        return answer

    def forget(self) -> None:
        """Let go of all results."""
        self._computed.clear()


def _key_of(cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the key under which a cache keeps the result for these arguments: a cache like it tells."""
    twin = functools.lru_cache(maxsize=None, typed=cache.cache_parameters()["typed"])(lambda *_, **__: None)
    twin(*args, **kwargs)
    return next(iter(entries_of(twin)))
