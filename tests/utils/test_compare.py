"""How far two results are from each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxlib.utils.compare import relative_error


@pytest.mark.slow
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_the_same_values_are_no_distance_apart_whatever_they_are(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert relative_error(tensor.clone(), tensor) == 0.0


def test_the_largest_difference_counts_over_the_largest_magnitude() -> None:
    reference = torch.tensor([0.0, -4.0, 1.0])
    assert relative_error(torch.tensor([1.0, -4.0, 1.5]), reference) == pytest.approx(0.25)


@pytest.mark.parametrize(
    "value, reference",
    [
        (torch.tensor([1.0]), torch.tensor([1.0, 1.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1]), torch.tensor([2])),
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])),
        (torch.tensor([1e-9]), torch.tensor([0.0])),
        (1, 2),
        (1, 1.0),
        (torch.tensor(1.0), 1.0),
    ],
)
def test_what_no_bound_could_hold_is_infinitely_far(value: object, reference: object) -> None:
    assert relative_error(value, reference) == math.inf


def test_infinities_at_the_same_places_leave_the_others_to_be_compared() -> None:
    assert relative_error(torch.tensor([math.inf, 1.5]), torch.tensor([math.inf, 2.0])) == pytest.approx(0.25)


def test_small_floats_are_compared_in_wide_ones() -> None:
    half = torch.tensor([60_000.0, 2.0], dtype=torch.float16)
    assert 0.0 < relative_error(-half, half) == 2.0
