"""Entries are held to the very objects that they had, whichever way a dict is written to, and however often."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxlib.runtime.guards import dict_entries
from fxlib.runtime.guards.capture_facts import same
from fxlib.runtime.guards.dict_entries import CHANGES_TO_RESTLESS, DictEntries, Mark

VALUE: Any = [1.0]
KEYS: tuple[Any, ...] = ("name", "it's", 3, True, ("a", 1), None)
CHANGES: dict[str, Callable[[dict[Any, Any], Any], object]] = {
    "an equal object": lambda table, key: table.update({key: [1.0]}),
    "deleted": lambda table, key: table.pop(key),
    "None": lambda table, key: table.update({key: None}),
    "set": lambda table, key: table.__setitem__(key, [1.0]),
    "merged": lambda table, key: table.__ior__({key: [1.0]}),
    "cleared": lambda table, _: table.clear(),
    "the last taken": lambda table, _: table.popitem(),
}
PHASES = ("never compared", "compared", "restless")


def held(entries: DictEntries, phase: str, table: dict[Any, Any]) -> DictEntries:
    """Return entries as they are before a check, behind one, or where a dict of theirs is written to again and again.

    Args:
        entries: all hold.
        phase: one of `PHASES`.
        table: the dict.
    """
    if phase != "never compared":
        assert entries.holds()
    for number in range(CHANGES_TO_RESTLESS if phase == "restless" else 0):
        table["another"] = number
        assert entries.holds()
        del table["another"]
    return entries


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda: defaultdict(list)], ids=["dict", "ordered", "default"])
@pytest.mark.parametrize("key", KEYS, ids=repr)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_entry_is_noticed(kind: Callable[[], Any], key: Any, change: str, phase: str) -> None:
    table = kind()
    table[key] = VALUE
    entries = DictEntries()
    entries.add(table, key, VALUE)
    held(entries, phase, table)
    CHANGES[change](table, key)
    assert not entries.holds()
    assert not entries.holds()
    table[key] = VALUE
    assert entries.holds()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", [dict, lambda: defaultdict(list)], ids=["dict", "default"])
def test_what_was_absent_has_to_stay_so_and_a_look_leaves_nothing_behind(kind: Callable[[], Any], phase: str) -> None:
    table, entries = kind(), DictEntries()
    entries.add(table, "name", Mark.ABSENT)
    held(entries, phase, table)
    assert entries.holds()
    assert not table
    table["name"] = None
    assert not entries.holds()


@pytest.mark.parametrize("phase", PHASES)
def test_an_entry_that_may_vary_holds_any_equal_object(phase: str) -> None:
    table, entries = {"name": 1.5}, DictEntries()
    entries.add(table, "name", 1.5)
    held(entries, phase, table)
    entries.let_vary(0, same)
    for _ in range(CHANGES_TO_RESTLESS + 1):
        table["name"] = float("1.5")
        assert entries.holds()
    table["name"] = 2.5
    assert not entries.holds()
    del table["name"]
    assert not entries.holds()


@pytest.mark.parametrize("phase", PHASES)
def test_an_entry_that_is_added_later_is_compared(phase: str) -> None:
    table, entries = {"name": VALUE, "other": VALUE}, DictEntries()
    entries.add(table, "name", VALUE)
    held(entries, phase, table)
    entries.add(table, "other", [1.0])
    assert not entries.holds()


@pytest.mark.parametrize("phase", PHASES)
def test_a_tensor_may_be_replaced_by_a_tensor_alone(phase: str) -> None:
    table: dict[str, Any] = {"weight": torch.zeros(1)}
    entries = DictEntries()
    entries.add(table, "weight", Mark.TENSOR)
    held(entries, phase, table)
    table["weight"] = nn.Parameter(torch.ones(1))
    assert entries.holds()
    table["weight"] = None
    assert not entries.holds()


@pytest.mark.parametrize("phase", PHASES)
def test_keys_keep_their_order(phase: str) -> None:
    table, entries = {"a": 1, "b": 2}, DictEntries()
    entries.add_order(table, ["a", "b"])
    if phase != "never compared":
        assert entries.holds()
    for number in range(CHANGES_TO_RESTLESS if phase == "restless" else 0):
        table["b"] = number
        assert entries.holds()
    table["a"] = table.pop("a")
    assert not entries.holds()
    table["b"] = table.pop("b")
    assert entries.holds()
    table["c"] = 3
    assert not entries.holds()


class Held:
    """Has an attribute of its own, and one of its class."""

    of_class: Any = VALUE

    def __init__(self) -> None:
        self.own = VALUE

    def write(self) -> None:
        """Replace the attribute, as the interpreter's quickened code does."""
        self.own = [1.0]


def held_once(table: dict[Any, Any], key: Any) -> DictEntries:
    """Return an entry that was compared once: its dict is not restless yet."""
    entries = DictEntries()
    entries.add(table, key, table[key])
    assert entries.holds()
    assert entries.holds()
    return entries


@pytest.mark.parametrize("asked_for", [False, True], ids=["the interpreter's own", "a dict"])
def test_attributes_of_objects_are_noticed_however_often_code_has_run(*, asked_for: bool) -> None:
    quickened = Held()
    for _ in range(100):  # on objects whose attributes are, or are not, in a dict
        quickened.write()
        if asked_for:
            assert "own" in quickened.__dict__
    for _ in range(100):
        each = Held()
        entries = held_once(each.__dict__, "own")
        each.write()
        assert not entries.holds()
        object.__setattr__(each, "own", VALUE)
        assert entries.holds()
        del each.own
        assert not entries.holds()


def test_attributes_of_classes_are_noticed() -> None:
    (table,) = gc.get_referents(Held.__dict__)
    entries = held_once(table, "of_class")
    Held.of_class = [1.0]
    assert not entries.holds()
    Held.of_class = VALUE
    assert entries.holds()
    del Held.of_class
    assert not entries.holds()
    Held.of_class = VALUE


def test_global_variables_are_noticed() -> None:
    scope: dict[str, Any] = {"value": VALUE}
    exec("def write():\n  global value\n  value = [1.0]", scope)  # noqa: S102 - a module of the test's own
    for _ in range(100):
        entries = held_once(scope, "value")
        scope["write"]()
        assert not entries.holds()


def test_only_a_dict_that_is_written_to_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, restless, entries = {"name": VALUE}, {"name": VALUE}, DictEntries()
    entries.add(steady, "name", VALUE)
    entries.add(restless, "name", VALUE)
    compared: list[int] = []
    whole = dict_entries._Comparison.holds

    def counted(comparison: Any) -> bool:
        compared.append(len(comparison._tables))
        return whole(comparison)

    monkeypatch.setattr(dict_entries._Comparison, "holds", counted)
    assert entries.holds()
    assert entries.holds()
    assert compared == [2]
    for number in range(CHANGES_TO_RESTLESS):
        restless["step"] = number
        assert entries.holds()
    assert compared == [2] * (1 + CHANGES_TO_RESTLESS)
    compared.clear()
    assert entries.holds()  # lays them out anew
    for number in range(10):
        restless["step"] = number
        assert entries.holds()
    assert compared == [2, *[1] * 10]


def test_a_check_of_another_thread_may_come_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    written, steady = {"key": VALUE, "another": 0}, {"key": VALUE}
    entries = DictEntries()
    for table in (written, steady):
        entries.add(table, "key", VALUE)
    assert entries.holds()
    compares = dict_entries._Comparison.holds

    def interrupted(comparison: Any) -> bool:
        monkeypatch.setattr(dict_entries._Comparison, "holds", compares)
        held(entries, "restless", written)  # as the other thread finds, which divides the dicts anew
        return compares(comparison)

    monkeypatch.setattr(dict_entries._Comparison, "holds", interrupted)
    written["another"] = 1

    assert entries.holds()
    assert entries.holds()
    for one, other in ((steady, written), (written, steady)):
        one["key"], other["key"] = [1.0], VALUE
        assert not entries.holds()
