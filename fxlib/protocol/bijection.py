"""A closed set of words, and the numbers that stand for them on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from fxlib.errors import WireError

W = TypeVar("W")
N = TypeVar("N")


class Bijection(Generic[W, N]):
    """Words to numbers and back."""

    def __init__(self, pairs: Mapping[W, N]) -> None:
        self._there = dict(pairs)
        self._back = {number: word for word, number in pairs.items()}

    def there(self, word: W) -> N:
        """Return the number of a word."""
        return self._there[word]

    def back(self, number: N, where: str) -> W:
        """Return the word of a number.

        Raises:
            WireError: the number stands for none; `where` names the field.
        """
        try:
            return self._back[number]
        except KeyError:
            raise WireError(f"{number} stands for nothing", where=where) from None
