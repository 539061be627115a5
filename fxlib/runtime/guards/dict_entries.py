"""Compare entries of dicts with the objects that they must hold; most guards are such comparisons."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from itertools import chain, repeat
from operator import is_
from typing import Any, Final

import torch
from torch._C._dynamo.guards import dict_version

CHANGES_TO_RESTLESS: Final = 3
"""Number of checks that find a dict written to, after which its entries are compared at each check."""


class Mark(Enum):
    """A mark in the place of a value in a guard."""

    ABSENT = "nothing"
    TENSOR = "a tensor"
    """The mark that stands for any tensor, since the graph reads it at each run."""


_ABSENT = Mark.ABSENT
"""The mark, looked up once, since members of an Enum are slow to reach."""


class DictEntries:
    """Entries of dicts, and the object to which each is held: `Mark.ABSENT` for an entry that did not exist.

    Each dict has a version, which every write to it replaces. A check compares the versions of all dicts with those of
    the last check that held and, if one differs, all entries. For a dict that is written to again and again, it
    compares the entries directly.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[dict[Any, Any], Any, Any]] = []
        self._orders: list[tuple[dict[Any, Any], Sequence[Any]]] = []
        self._changes: dict[int, int] = {}
        """The number of checks at which a dict had another version, by the dict's id."""
        self._all: _Comparison | None = None
        """The comparison of all entries; None if some were added since it was made."""
        self._restless: _Comparison | None = None
        """The comparison of the entries of dicts that are written to again and again; None if there are none."""
        self._steady: list[dict[Any, Any]] = []
        """The dicts that are not written to again and again."""
        self._versions: list[int] | None = None
        """The versions of the steady dicts when all entries held; None if they never have."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Hold an entry to a value."""
        self._entries.append((table, key, value))
        self._all = self._versions = None

    def add_order(self, table: dict[Any, Any], keys: Sequence[Any]) -> None:
        """Hold a plain dict to exactly these keys in this order."""
        self._orders.append((table, keys))
        self._all = self._versions = None

    def now(self, index: int) -> Any:
        """Return the present value of the entry that was added as number `index`."""
        table, key, _ = self._entries[index]
        return dict.get(table, key, _ABSENT)

    def hold_to(self, index: int, value: Any) -> None:
        """Hold an entry to another value from now on."""
        self._entries[index] = (*self._entries[index][:2], value)
        self._all = self._versions = None

    def holds(self) -> bool:
        """Return whether each entry holds its object, and each dict that has an order its keys."""
        versions = list(map(dict_version, self._steady))
        if versions == self._versions:
            return self._restless is None or self._restless.holds()
        return self._compare(versions)

    def _compare(self, versions: list[int]) -> bool:
        """Compare all entries and, if they hold, note the versions that dicts had before."""
        if self._all is None:
            self._lay_out()
            versions = list(map(dict_version, self._steady))
        assert self._all is not None  # noqa: S101 - laid out above
        if not self._all.holds():
            return False
        changed = []
        if self._versions is not None:
            pairs = zip(self._steady, self._versions, versions, strict=True)
            changed = [id(table) for table, before, now in pairs if before != now]
        self._versions = versions
        for each in changed:
            self._changes[each] = self._changes.get(each, 0) + 1
        if any(self._changes[each] == CHANGES_TO_RESTLESS for each in changed):
            self._lay_out()
        return True

    def _lay_out(self) -> None:
        """Divide dicts into those that are written to again and again, and steady ones, without known versions yet."""
        tables = {id(table): table for table, _, _ in self._entries} | {id(table): table for table, _ in self._orders}
        restless = {each for each in tables if self._changes.get(each, 0) >= CHANGES_TO_RESTLESS}
        self._all = _Comparison(self._entries, self._orders, tables.keys())
        self._restless = _Comparison(self._entries, self._orders, restless) if restless else None
        self._steady = [table for each, table in tables.items() if each not in restless]
        self._versions = None


class _Comparison:
    """Entries of some dicts, laid out so that a few passes in C compare them.

    Args:
        entries: dict, key and value of each entry of any dict.
        orders: dicts and their keys.
        ids: the ids of the dicts whose entries are compared.
    """

    def __init__(
        self,
        entries: Iterable[tuple[dict[Any, Any], Any, Any]],
        orders: Iterable[tuple[dict[Any, Any], Sequence[Any]]],
        ids: Collection[int],
    ) -> None:
        own = [each for each in entries if id(each[0]) in ids]
        plain = [each for each in own if each[2] is not Mark.TENSOR]
        tensors = [each for each in own if each[2] is Mark.TENSOR]
        ordered = [each for each in orders if id(each[0]) in ids]
        self._tables, self._keys, self._values = [[each[place] for each in plain] for place in range(3)]
        self._of_tensors, self._tensors = [[each[place] for each in tensors] for place in range(2)]
        self._ordered = [table for table, _ in ordered]
        self._sizes = [len(keys) for _, keys in ordered]
        self._order = [key for _, keys in ordered for key in keys]

    def holds(self) -> bool:
        """Return whether each entry holds its object, and each dict that has an order its keys."""
        return (
            all(map(is_, map(dict.get, self._tables, self._keys, repeat(_ABSENT)), self._values))
            and all(map(isinstance, map(dict.get, self._of_tensors, self._tensors), repeat(torch.Tensor)))
            and list(map(len, self._ordered)) == self._sizes
            and all(map(is_, chain.from_iterable(self._ordered), self._order))
        )
