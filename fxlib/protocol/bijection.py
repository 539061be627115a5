"""A closed set of words, and the numbers that stand for them on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from fxlib.protocol.converter import Rule
from fxlib.wire.faults import Fault

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

    def back(self, number: N) -> W:
        """Return the word of a number.

        Raises:
            Fault: the number stands for none.
        """
        try:
            return self._back[number]
        except KeyError:
            raise Fault(f"{number} stands for nothing") from None

    @property
    def rule(self) -> Rule:
        """The rule of a field that holds such a number."""
        return Rule(self.there, self.back)
