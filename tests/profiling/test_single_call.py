"""What a remote function returned, described so that it can travel and be told from what cannot."""

from collections import namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch

from fxlib.profiling.single_call import is_complete, structure_of
from fxlib.protocol import profile_from_proto, profile_to_proto
from fxlib.spec.profile import CallProfile, Opaque, Profile, Spread

Pair = namedtuple("Pair", "rows count")  # noqa: PYI024 - as a server may return


class Level(IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value, kept", [(np.float64(2.5), 2.5), (Level.LOW, 1), (Text("a"), "a"), (True, True), (None, None)]
)
def test_numbers_and_texts_of_any_class_travel_by_value(value: object, kept: float | str | None) -> None:
    assert is_complete(value)
    returns = structure_of(value)
    call = CallProfile(
        call="a",
        function="my.ps:a",
        to="ps0",
        request_bytes=0,
        response_bytes=0,
        returns=returns,
        issue_s=0.0,
        wait_s=0.0,
        service_s=Spread.of([0.0]),
    )
    assert profile_from_proto(profile_to_proto(Profile(calls=(call,)))).calls[0].returns == Opaque(value=kept)


@pytest.mark.parametrize("value", [Pair(torch.ones(2), 3), {1: torch.ones(2)}, object(), "\ud800", [np.ones(2)]])
def test_what_cannot_be_replayed_is_known(value: object) -> None:
    assert not is_complete(value)


def test_nests_of_plain_containers_are_told() -> None:
    value = (torch.ones(2), [1, "a"], {"b": torch.Size([3]), "c": None})
    assert is_complete(value)
