"""Parameters of a model under several names: their gradients add up in one sum, whose order a rewrite has kept."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fxlib.runtime.submodules import local_modules


class TiedParameters:
    """The parameters that a model has under several names, noted as they are now.

    Args:
        module: stands in for `original`, and has tables of its own for the root's parameters.
        original: the model; None if there is none, and nothing to check.
    """

    def __init__(self, module: nn.Module, original: nn.Module | None) -> None:
        parts = [] if original is None else [each for _, each in local_modules(original)]
        self._root = module
        self._parts = parts[1:]
        self._names = [list(each._parameters) for each in parts]
        self._tables: list[dict[str, Any]] = []
        self._slots: list[str] = []
        self._known = self._identities()
        self._pattern = _pattern(self._known)

    def rebased(self, module: nn.Module) -> TiedParameters:
        """Return the same record for another module that stands in for the same original."""
        copied = copy.copy(self)
        copied._root, copied._tables, copied._slots, copied._known = module, [], [], []
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> TiedParameters:
        copied = self.rebased(copy.deepcopy(self._root, memo))
        copied._parts = copy.deepcopy(self._parts, memo)
        return copied

    def broken(self) -> bool:
        """Whether other names than at capture now share a parameter."""
        now = self._identities()
        if now == self._known:
            return False
        if _pattern(now) != self._pattern:
            return True
        self._known = now
        return False

    def _identities(self) -> list[int]:
        """Return the ids of all parameters, in their order: no references, which would keep what was replaced."""
        return list(map(id, self.parameters()))

    def parameters(self) -> Iterable[Any]:
        """Return all parameters as they are now, in their order, None where there is none any more."""
        if not self._slots:
            for part, names in zip((self._root, *self._parts), self._names, strict=False):
                self._tables += [part._parameters] * len(names)
                self._slots += names
        return map(dict.get, self._tables, self._slots)


def _pattern(identities: Sequence[int]) -> list[int]:
    """Return for each parameter the index of the first that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(each, place) for place, each in enumerate(identities)]
