"""A container that a server returned, and that the forward changes: what is asked of it afterwards, and before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.rpc import rpc_sync

import fxlib
from fxlib.errors import CaptureError, ContractError
from tests.capture import servers
from tests.capture.checks import assert_same, same

X = torch.ones(2, 4)
pytestmark = pytest.mark.usefixtures("world")


def received(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", servers.rows_and_features, args=(x,))


LISTS: dict[str, Callable[[list[Any], Any], Any]] = {
    "append": lambda rows, x: rows.append(x),
    "extend": lambda rows, x: rows.extend([x, x]),
    "insert": lambda rows, x: rows.insert(0, x),
    "pop": lambda rows, _: rows.pop(),
    "clear": lambda rows, _: rows.clear(),
    "slice": lambda rows, x: rows.__setitem__(slice(None), [x, x, x]),
    "iadd": lambda rows, x: rows.__iadd__([x]),
}
DICTS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "new key": lambda features, x: features.__setitem__("dense", x),
    "update": lambda features, x: features.update(dense=x),
    "setdefault": lambda features, x: features.setdefault("dense", x),
    "pop": lambda features, _: features.pop("a"),
    "popitem": lambda features, _: features.popitem(),
    "clear": lambda features, _: features.clear(),
    "ior": lambda features, x: features.__ior__({"dense": x}),
}
ASKED_OF_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "iterated": lambda rows: [row * 2 for row in rows],
    "counted": len,
    "unpacked": lambda rows: (*rows,),
}
ASKED_OF_DICTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "values": lambda features: torch.cat(list(features.values()), 1),
    "items": lambda features: [value * len(key) for key, value in features.items()],
    "keys": lambda features: len(list(features.keys())),
    "copied": lambda features: {**features},
    "looked for": lambda features: 2 if "dense" in features else 3,
    "counted": len,
}


def refused(forward: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="only a run knows") as refusal:
        fxlib.capture(forward)
    assert refusal.value.where.startswith(__file__)
    assert refusal.value.hint


@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen"])
@pytest.mark.parametrize("asked", ASKED_OF_LISTS.values(), ids=ASKED_OF_LISTS)
@pytest.mark.parametrize("change", LISTS.values(), ids=LISTS)
def test_a_changed_list_has_its_declared_elements_no_longer(change: Any, asked: Any, seen: bool) -> None:
    def forward(x: torch.Tensor) -> Any:
        everything = received(x)
        rows, size = everything[0], len(everything[0]) if seen else 1
        change(everything[0], x)
        return asked(rows), size

    refused(forward)


@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen"])
@pytest.mark.parametrize("asked", ASKED_OF_DICTS.values(), ids=ASKED_OF_DICTS)
@pytest.mark.parametrize("change", DICTS.values(), ids=DICTS)
def test_a_changed_dict_has_its_declared_keys_no_longer(change: Any, asked: Any, seen: bool) -> None:
    def forward(x: torch.Tensor) -> Any:
        features = received(x)[1]
        size = len(features) if seen else 1
        change(features, x)
        return asked(features), size

    refused(forward)


def views_before(x: torch.Tensor) -> Any:
    features = received(x)[1]
    values = features.values()
    features["dense"] = x
    return sum(values)


def adds_in_the_last_round(x: torch.Tensor) -> Any:
    rows, total = received(x)[0], x
    for index, row in enumerate(rows):
        total = total + row
        if index == 1:
            rows.append(x)
    return total


def changes_a_part_of_a_copy(x: torch.Tensor) -> Any:
    everything = received(x)
    everything.copy()[0].append(x)
    return sum(everything[0])


def reverses_what_differs(x: torch.Tensor) -> Any:
    everything = received(x)
    everything.reverse()
    return sum(everything[0])


@pytest.mark.parametrize(
    "forward", [views_before, adds_in_the_last_round, changes_a_part_of_a_copy, reverses_what_differs]
)
def test_no_detour_gets_an_old_answer(forward: Callable[[torch.Tensor], Any]) -> None:
    refused(forward)


def test_deleting_an_element_is_refused() -> None:
    def forward(x: torch.Tensor) -> Any:
        features = received(x)[1]
        del features["a"]
        return features

    with pytest.raises(CaptureError, match="deletes an element"):
        fxlib.capture(forward)


def a_new_key_is_read(x: torch.Tensor) -> Any:
    features = received(x)[1]
    features["dense"] = x * 3
    return features["dense"] + features["a"] + features.get("dense")


def a_longer_list_goes_on(x: torch.Tensor) -> Any:
    rows = received(x)[0]
    size = len(rows)
    rows.append(x)
    return torch.cat(rows, 1) * size


def elements_are_exchanged(x: torch.Tensor) -> Any:
    rows, features, *_ = received(x)
    rows[0] = x * 5
    features["a"] = x * 7
    features["b"] += 1
    rows.reverse()
    return sum(rows) + rows[0] + sum(features.values()) + features.get("a") + len(rows)


def elements_ahead_are_exchanged(x: torch.Tensor) -> Any:
    (rows, features), total = received(x), x
    for row in rows:
        rows[1] = x * 5
        total = total + row
    for key, value in features.items():
        features["b"] = x * 7
        total = total + value * len(key)
    return total


def copies_are_changed(x: torch.Tensor) -> Any:
    rows, features = received(x)
    rows, features = [*rows, x], {**features, "dense": x}
    rows.append(x * 2)
    return torch.cat([*rows, *features.values()], 1), [*reversed(features.items())], features.get("none", x)


@pytest.mark.parametrize(
    "forward",
    [
        a_new_key_is_read,
        a_longer_list_goes_on,
        elements_are_exchanged,
        elements_ahead_are_exchanged,
        copies_are_changed,
    ],
)
def test_what_needs_no_declared_structure_follows_the_change(forward: Callable[[torch.Tensor], Any]) -> None:
    captured = same(forward, X)
    assert_same(fxlib.optimize(captured)(X), forward(X))


def appends_to(rows: list[torch.Tensor]) -> torch.Tensor:
    rows.append(rows[0])
    return rows[0]


def test_what_a_function_kept_whole_may_have_changed_is_checked_again() -> None:
    def forward(x: torch.Tensor) -> Any:
        rows = received(x)[0]
        return len(rows) * appends_to(rows) + len(rows)

    with pytest.raises(ContractError, match="declares 2 elements"):
        fxlib.capture(forward, wrap=[appends_to])(X)
