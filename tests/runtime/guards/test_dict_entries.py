"""Entries are held to the very objects that they had, by the pass in C and by the code generated for them alike."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from fxlib.runtime.guards import dict_entries
from fxlib.runtime.guards.dict_entries import COMPILED_AFTER, DictEntries, Mark

VALUE: Any = [1.0]
KEYS: tuple[Any, ...] = ("name", "it's", 3, True, ("a", 1), None)
CHANGES: dict[str, Callable[[dict[Any, Any], Any], object]] = {
    "an equal object": lambda table, key: table.update({key: [1.0]}),
    "deleted": lambda table, key: table.pop(key),
    "None": lambda table, key: table.update({key: None}),
}


def held(entries: DictEntries, *, compiled: bool) -> DictEntries:
    """Return entries that are compared by generated code, or are not yet."""
    for _ in range(COMPILED_AFTER if compiled else 1):
        assert entries.holds()
    return entries


@pytest.mark.parametrize("compiled", [False, True], ids=["pass", "generated"])
@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda: defaultdict(list)], ids=["dict", "ordered", "default"])
@pytest.mark.parametrize("key", KEYS, ids=repr)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_entry_is_noticed(kind: Callable[[], Any], key: Any, change: str, *, compiled: bool) -> None:
    table = kind()
    table[key] = VALUE
    entries = DictEntries()
    entries.add(table, key, VALUE)
    held(entries, compiled=compiled)
    CHANGES[change](table, key)
    assert not entries.holds()
    table[key] = VALUE
    assert entries.holds()


@pytest.mark.parametrize("compiled", [False, True], ids=["pass", "generated"])
@pytest.mark.parametrize("kind", [dict, lambda: defaultdict(list)], ids=["dict", "default"])
def test_what_was_absent_has_to_stay_so_and_a_look_leaves_nothing_behind(
    kind: Callable[[], Any], *, compiled: bool
) -> None:
    table, entries = kind(), DictEntries()
    entries.add(table, "name", Mark.ABSENT)
    held(entries, compiled=compiled)
    assert not table
    table["name"] = None
    assert not entries.holds()


@pytest.mark.parametrize("compiled", [False, True], ids=["pass", "generated"])
def test_an_entry_can_be_held_to_another_object(*, compiled: bool) -> None:
    table, entries, other = {"name": VALUE}, DictEntries(), object()
    entries.add(table, "name", VALUE)
    held(entries, compiled=compiled)
    table["name"] = other
    assert entries.now(0) is other
    entries.hold_to(0, other)
    held(entries, compiled=compiled)
    table["name"] = VALUE
    assert not entries.holds()


def test_code_is_generated_for_entries_that_keep_holding_and_not_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = DictEntries()
    entries.add({"name": VALUE}, "name", VALUE)
    first = entries.holds
    held(entries, compiled=True)
    assert entries.holds != first
    monkeypatch.setattr(dict_entries, "MOST_COMPILED", 0)
    many = DictEntries()
    many.add({"name": VALUE}, "name", VALUE)
    first = many.holds
    held(many, compiled=True)
    assert many.holds == first
