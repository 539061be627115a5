"""What shares memory within one value does so after a batch; what two values share is copied, whatever holds it."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from fxlib.batch.isolation import isolated

Pair = namedtuple("Pair", "whole, part")  # noqa: PYI024 - as a server might return


def test_what_overlaps_in_one_value_overlaps_in_its_copy() -> None:
    x = torch.zeros(8)
    _, (whole, part) = isolated([(x,), (x, x[2:4])])
    part.add_(1.0)
    assert whole.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert x.tolist() == [0.0] * 8


@pytest.mark.parametrize("view", [lambda x: x[:, :1].expand(3, 4), lambda x: x[1:, 1:3], lambda x: x.t()])
def test_a_copy_lies_in_memory_as_what_it_is_a_copy_of(view: Any) -> None:
    x = torch.arange(12.0).view(3, 4)
    _, copied = isolated([x, view(x)])
    assert copied.stride() == view(x).stride()
    assert torch.equal(copied, view(x))


def test_values_in_named_tuples_share_nothing() -> None:
    x = torch.zeros(4)
    first, second = isolated([Pair(x, x[1:]), Pair(x, x[1:])])
    first.whole.add_(1.0)
    assert second.whole.tolist() == [0.0] * 4
    assert second.part.data_ptr() == second.whole[1:].data_ptr()
    assert type(second) is Pair
