"""How far two results are from each other."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxlib.utils.compare import Tolerance, difference, largest_difference, relative_error
from tests.shared.scaled import Scaled


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


def rows(*each: list[float], layout: torch.layout = torch.jagged, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in each], layout=layout)


WITHIN = Tolerance(rtol=1e-3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_tolerance_is_for_figures_and_not_for_the_ends_of_rows_or_integers(layout: torch.layout) -> None:
    one, near = rows([1.0, 2.0], [3.0], layout=layout), rows([1.0, 2.0], [3.0001], layout=layout)
    assert difference(one, near, WITHIN) == ""
    assert 0.0 < relative_error(near, one) < 1e-3
    other_ends = rows([1.0], [2.0, 3.0], layout=layout)
    assert difference(one, other_ends, WITHIN).endswith("elements differ, by 0 at most")
    assert relative_error(other_ends, one) == math.inf
    counts, others = (rows([1, 2], [last], layout=layout, dtype=torch.int64) for last in (3, 4))
    assert difference(counts, others, WITHIN).endswith("elements differ, by 0 at most")


def test_a_tolerance_does_not_ask_how_numbers_are_stored() -> None:
    one, other = rows([1.0, 2.0], [3.0]), rows([1.0, 2.0], [3.0001])
    torch.nested.to_padded_tensor(other, 0.0)  # which notes the greatest length
    assert difference(one, other, WITHIN) == ""
    sparse = torch.tensor([1.0, 0.0]).to_sparse()
    places, values = torch.tensor([[0, 1]]), torch.tensor([1.0001, 0.0])
    explicit = torch.sparse_coo_tensor(places, values, (2,), check_invariants=True)
    assert difference(sparse, explicit, WITHIN) == ""
    assert difference(sparse, torch.tensor([0.0, 1.0]).to_sparse(), WITHIN) == "2 of 2 elements differ, by 1 at most"


@pytest.mark.parametrize("scale, is_same", [(0.5, True), (2.0, False), (-0.5, False), (None, False)])
@pytest.mark.parametrize("tolerance", [Tolerance(), WITHIN])
def test_wrappers_differ_in_what_they_keep_beside_the_tensors(
    scale: float | None, is_same: bool, tolerance: Tolerance
) -> None:
    inner = torch.tensor([1, 2], dtype=torch.int8)
    one, other = Scaled(inner, 0.5), Scaled(inner.clone(), scale)
    assert difference(one, other, tolerance) == ("" if is_same else "they wrap tensors differently")
    assert difference(Scaled(one, 1.0), Scaled(other, 1.0), tolerance) == difference(one, other, tolerance)
    assert relative_error(one, other) == largest_difference(one, other) == (0.0 if is_same else math.inf)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_whether_a_tensor_takes_a_gradient_is_no_part_of_its_value() -> None:
    one = rows([1.0, 2.0], [3.0])
    assert difference(one.detach().requires_grad_(), one, Tolerance()) == ""


@pytest.mark.parametrize(
    "one, other",
    [
        (np.ones(1, np.float32), np.ones((1, 1), np.float32)),
        (np.ones(2, np.float32), np.ones(2)),
        (np.ones(2), np.array([1.0, 2.0])),
        (np.array(["a"]), np.array(["b"])),
        (np.float32(0.0), np.float32(-0.0)),
        ({1}, {True}),
        (frozenset({0.0}), frozenset({-0.0})),
    ],
)
def test_values_other_than_tensors_differ_in_their_kinds_and_bits(one: object, other: object) -> None:
    assert difference(one, other, Tolerance()) == f"{one!r} and {other!r}"
    assert difference(one, copy.deepcopy(one), Tolerance()) == ""
    assert relative_error(one, other) == math.inf
    assert relative_error(one, copy.deepcopy(one)) == 0.0


def test_a_tolerance_is_for_figures_of_arrays_too() -> None:
    assert difference(np.array([[1.0, math.nan]]), np.array([[1.0001, math.nan]]), WITHIN) == ""
    assert difference(np.float32(1.0), np.float32(1.0001), WITHIN) == ""
    assert difference(np.array([1.0]), np.array([1.1]), WITHIN) == "array([1.]) and array([1.1])"
    assert difference(np.array([1000]), np.array([1001]), Tolerance(rtol=0.1)) == "array([1000]) and array([1001])"


def test_a_tensor_whose_memory_is_freed_is_not_read() -> None:
    here, freed = torch.ones(3), torch.ones(3)
    freed.untyped_storage().resize_(0)
    kind = "torch.float32 of shape (3,) on cpu"
    assert difference(here, freed, WITHIN) == f"{kind} and {kind}, freed"
    assert relative_error(freed, here) == relative_error(here, freed) == math.inf
    assert relative_error(freed, freed) == 0.0
    assert largest_difference(freed, freed) == math.inf
