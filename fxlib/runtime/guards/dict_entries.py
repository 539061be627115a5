"""Compare entries of dicts with the objects that they must hold; most guards are comparisons of this kind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from itertools import repeat
from operator import is_
from typing import Any, Final

COMPILED_AFTER: Final = 8
"""Number of successful checks in a row after which code is generated for the entries."""
MOST_COMPILED: Final = 2_000
"""The largest number of entries for which code is generated: 20 us for each, once, which halves the time of a check."""
_SUBSCRIPTED = (dict, OrderedDict)
"""Classes whose `table[key]` is `dict.get`, but for what is absent."""


class Mark(Enum):
    """A mark in the place of a value in a guard."""

    ABSENT = "nothing"
    TENSOR = "a tensor"
    """Stands for any tensor, since the graph reads it at each run."""


_ABSENT = Mark.ABSENT
"""Looked up once: members of an Enum are slow to reach."""


class DictEntries:
    """Entries of dicts, and the object that each is held to: `Mark.ABSENT` where there was none.

    They are compared in one pass in C. Entries that have held for a while are compared by code that is generated for
    them, `a[b] is not c or ...`, which takes half of that time.
    """

    def __init__(self) -> None:
        self.holds: Callable[[], bool] = self._compare
        """Returns whether each entry holds its object."""
        self._checks = 0
        self._tables: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Hold an entry to a value."""
        self._tables.append(table)
        self._keys.append(key)
        self._values.append(value)

    def now(self, index: int) -> Any:
        """Return what the entry that was added as number `index` holds now."""
        return dict.get(self._tables[index], self._keys[index], _ABSENT)

    def hold_to(self, index: int, value: Any) -> None:
        """Hold an entry to another value from now on."""
        self._values[index] = value
        self._checks, self.holds = 0, self._compare

    def _compare(self) -> bool:
        same = all(map(is_, map(dict.get, self._tables, self._keys, repeat(_ABSENT)), self._values))
        self._checks = self._checks + 1 if same else 0
        if self._checks == COMPILED_AFTER and 0 < len(self) <= MOST_COMPILED:
            self.holds = self._compiled()
        return same

    def _compiled(self) -> Callable[[], bool]:
        known: dict[str, Any] = {"get": dict.get, "absent": _ABSENT}
        names: dict[int, str] = {id(each): repr(each) for each in (None, True, False)}

        def name(value: Any) -> str:
            if id(value) not in names:
                names[id(value)] = made = f"_{len(known)}"
                known[made] = value
            return names[id(value)]

        differences = []
        for table, key, value in zip(self._tables, self._keys, self._values, strict=True):
            where, what = name(table), name(key)  # keys are others' text, and none of it is in the code
            if type(table) not in _SUBSCRIPTED:
                differences.append(f"get({where}, {what}, absent) is not {name(value)}")
            elif value is _ABSENT:
                differences.append(f"{what} in {where}")
            else:
                differences.append(f"{where}[{what}] is not {name(value)}")
        lines = " or\n        ".join(differences)
        text = f"def holds():\n  try:\n    return not (\n        {lines}\n    )\n  except KeyError:\n    return False\n"
        exec(compile(text, "<guards of fxlib>", "exec"), known)  # noqa: S102 - made above, of names of its own alone
        holds: Callable[[], bool] = known["holds"]
        return holds
