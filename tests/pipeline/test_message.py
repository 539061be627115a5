"""Keys that a batch names many times are read once, with the bits of reading each as often as it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fxlib.pipeline.message import KeysOnce
from fxlib.spec.contract import contract_of
from tests.pipeline.test_by_keys import KEYS, captured, check_same, no_delay, plain, trained
from tests.random_programs.trainings import look_up_bags, look_up_momentum, look_up_rows

pytestmark = pytest.mark.slow

__all__ = ["no_delay"]

REPEATED = [
    torch.tensor([1, 2, 1, 1, 2, 1]),
    torch.tensor([2, 3, 3, 2, 2, 3]),
    torch.tensor([5, 5, 5, 5, 5, 5]),
    torch.tensor([7, 3, 7, 3, 7, 7]),
]


@pytest.fixture
def sent() -> Iterator[list[list[int]]]:
    """Collects the keys of each call that is sent with each of its keys once."""
    found: list[list[int]] = []
    original = KeysOnce.of

    def noted(self: KeysOnce, calls: Any, contracts: Any) -> Any:
        made = original(self, calls, contracts)
        if made is not None:
            found.extend(args[1].tolist() for _, args, _ in made[0])
        return made

    with mock.patch.object(KeysOnce, "of", noted):
        yield found


@pytest.mark.parametrize("function", [look_up_rows, look_up_momentum], ids=["read again", "updated"])
def test_each_key_travels_once_and_every_bit_is_as_before(
    function: Callable[..., torch.Tensor], sent: list[list[int]]
) -> None:
    loop = check_same(REPEATED * 3, function)
    assert loop.taken > 0
    assert [5] in sent
    assert all(len(set(keys)) == len(keys) for keys in sent)


def test_keys_that_are_mostly_different_travel_as_they_are(sent: list[list[int]]) -> None:
    check_same(KEYS * 3)
    assert sent == []


@pytest.mark.parametrize("function", [look_up_rows, look_up_momentum], ids=["read again", "updated"])
def test_some_batches_may_repeat_their_keys_and_some_not(
    function: Callable[..., torch.Tensor], sent: list[list[int]]
) -> None:
    with mock.patch("fxlib.pipeline.message._LOOK_EVERY", 1):
        check_same([*REPEATED, *KEYS, torch.tensor([], dtype=torch.int64), *REPEATED] * 2, function)
    assert sent


def test_bags_of_keys_travel_as_they_are(sent: list[list[int]]) -> None:
    check_same([torch.tensor([[1, 1], [1, 1]]), torch.tensor([[1, 1], [2, 1]])] * 3, look_up_bags)
    assert sent == []


@pytest.mark.parametrize("function", [look_up_rows, look_up_momentum], ids=["read again", "updated"])
def test_negative_keys_among_others_are_read_behind_the_push(function: Callable[..., torch.Tensor]) -> None:
    """They are found after the keys were made to travel once, and with their state."""
    check_same([REPEATED[0], torch.tensor([-1, 2, -1, -1, 2, -1]), *REPEATED] * 2, function)


def test_a_message_that_fails_for_it_is_made_as_the_program_makes_it_from_then_on() -> None:
    expected, _ = plain(REPEATED * 3)
    module = captured()
    with (
        mock.patch.object(KeysOnce, "give_up", autospec=True, side_effect=KeysOnce.give_up) as given_up,
        mock.patch("fxlib.pipeline.taken.TakenCall.wait", lambda taken: taken._again()),
    ):
        found, _, _ = trained(module, REPEATED * 3)
    assert all(map(torch.equal, found, expected))
    assert given_up.call_count >= 1


def test_a_call_without_repetition_is_looked_at_again_later() -> None:
    once, contract = KeysOnce(), contract_of(look_up_rows)
    assert contract is not None

    def of(keys: torch.Tensor) -> Any:
        return once.of([("f", ("users", keys), {})], [contract])

    assert of(KEYS[0]) is None
    assert of(REPEATED[0]) is None
    for _ in range(62):
        of(REPEATED[0])
    calls, (positions,) = of(REPEATED[0])
    (_, (_, keys), _) = calls[0]
    assert torch.equal(keys[positions], REPEATED[0])
    once.give_up()
    assert of(REPEATED[0]) is None
