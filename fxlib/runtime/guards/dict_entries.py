"""Compare entries of dicts with the objects that they must hold; most guards are such comparisons."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from itertools import chain, repeat
from operator import is_
from typing import Any, Final, TypeAlias

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


def table_of_class(kind: type) -> dict[str, Any]:
    """Return the dict in which a class keeps its own attributes."""
    (table,) = gc.get_referents(kind.__dict__)  # the dict itself, behind its proxy
    return table


class DictEntries:
    """Entries of dicts, and the object to which each is held: `Mark.ABSENT` for an entry that did not exist.

    Each dict has a version, which every write to it replaces. A check compares the versions of all dicts with those of
    the last check that held and, if one differs, all entries. For a dict that is written to again and again, it
    compares the entries directly.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[dict[Any, Any], Any, Any]] = []
        self._varying: Mapping[int, Callable[[Any, Any], bool]] = {}
        """By its number, what compares an entry that other objects may hold."""
        self._orders: list[tuple[dict[Any, Any], Sequence[Any]]] = []
        self._changes: dict[int, int] = {}
        """The number of checks at which a dict had another version, by the dict's id."""
        self._layout: _Layout = _UNMADE
        """Each check reads this once, and replaces it as a whole: threads may check at the same time."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Hold an entry to a value."""
        self._entries.append((table, key, value))
        self._layout = _UNMADE

    def add_order(self, table: dict[Any, Any], keys: Sequence[Any]) -> None:
        """Hold a plain dict to exactly these keys in this order."""
        self._orders.append((table, keys))
        self._layout = _UNMADE

    def now(self, index: int) -> Any:
        """Return the present value of the entry that was added as number `index`."""
        table, key, _ = self._entries[index]
        return dict.get(table, key, _ABSENT)

    def let_vary(self, index: int, equal: Callable[[Any, Any], bool]) -> None:
        """Let an entry hold, from now on, any object that is equal to its value: a loop sets it again and again."""
        self._varying = {**self._varying, index: equal}  # another thread may lay the entries out
        self._layout = _UNMADE

    def holds(self) -> bool:
        """Return whether each entry holds its object, and each dict that has an order its keys."""
        layout = self._layout
        steady, known, restless, _ = layout
        versions = list(map(dict_version, steady))
        if versions == known:
            return restless is None or restless.holds()
        return self._compare(layout, versions)

    def _compare(self, layout: _Layout, versions: list[int]) -> bool:
        """Compare all entries and, if they hold, note the versions that dicts had before, unless the layout is new."""
        steady, known, restless, every = layout
        if every is None:
            layout = self._layout = self._laid_out()
            steady, known, restless, every = layout
            versions = list(map(dict_version, steady))
        assert every is not None  # noqa: S101 - laid out above
        if not every.holds():
            return False
        changed = []
        if known is not None:
            pairs = zip(steady, known, versions, strict=True)
            changed = [id(table) for table, before, now in pairs if before != now]
        for each in changed:
            self._changes[each] = self._changes.get(each, 0) + 1
        are_restless = any(self._changes[each] >= CHANGES_TO_RESTLESS for each in changed)
        noted = self._laid_out() if are_restless else (steady, versions, restless, every)
        if self._layout is layout:
            self._layout = noted
        return True

    def _laid_out(self) -> _Layout:
        """Divide dicts into those that are written to again and again, and steady ones, without known versions yet."""
        tables = {id(table): table for table, _, _ in self._entries} | {id(table): table for table, _ in self._orders}
        restless = {each for each in tables if self._changes.get(each, 0) >= CHANGES_TO_RESTLESS}
        steady = [table for each, table in tables.items() if each not in restless]
        every = _Comparison(self, tables.keys())
        return steady, None, _Comparison(self, restless) if restless else None, every


class _Comparison:
    """Entries of some dicts, laid out so that a few passes in C compare them.

    Args:
        held: the entries of all dicts, and the order of their keys.
        ids: the ids of the dicts whose entries are compared.
    """

    def __init__(self, held: DictEntries, ids: Collection[int]) -> None:
        own = {index: each for index, each in enumerate(held._entries) if id(each[0]) in ids}
        self._varying = [(equal, *own.pop(index)) for index, equal in held._varying.items() if index in own]
        plain = [each for each in own.values() if each[2] is not Mark.TENSOR]
        tensors = [each for each in own.values() if each[2] is Mark.TENSOR]
        ordered = [each for each in held._orders if id(each[0]) in ids]
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
            and all(equal(dict.get(table, key, _ABSENT), value) for equal, table, key, value in self._varying)
            and list(map(len, self._ordered)) == self._sizes
            and all(map(is_, chain.from_iterable(self._ordered), self._order))
        )


_Layout: TypeAlias = tuple[Sequence[dict[Any, Any]], list[int] | None, _Comparison | None, _Comparison | None]
"""The steady dicts, which are not written to again and again; their versions when all entries held, or None if they
never have; the comparison of the other dicts' entries, or None if there are none; and the comparison of all entries, or
None if some were added since."""
_UNMADE: _Layout = ([], None, None, None)
