"""An export remembers which inputs fitted it: others, which differ in one thing alone, still do not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import fxlib
from fxlib.runtime.guards.export_guards import GuardedCodeGen

pytestmark = pytest.mark.slow


class Bags(nn.Module):
    """Takes tensors in lists, dictionaries and tuples, and a number."""

    @override
    def forward(self, dense: Tensor, bags: list[Tensor], more: dict[str, Any], scale: float) -> Tensor:
        total = dense * scale
        if len(bags) > 1 and dense.shape[0] > 1:
            for each in bags:
                total = total + each.sum()
        return total + more["a"] + more["b"][0]


def inputs() -> list[Any]:
    one = torch.ones(4, 3)
    return [one, [torch.arange(5), torch.arange(5) + 1], {"a": torch.ones(3), "b": (torch.ones(3), None)}, 2.0]


def edited(edit: Callable[[list[Any]], object]) -> list[Any]:
    found = inputs()
    edit(found)
    return found


def put(place: int, value: Any) -> Callable[[list[Any]], object]:
    return lambda given: given.__setitem__(place, value)


def put_in(place: int, key: Any, value: Any) -> Callable[[list[Any]], object]:
    return lambda given: given[place].__setitem__(key, value)


OTHERS: dict[str, Callable[[list[Any]], object]] = {
    "dtype": put(0, torch.ones(4, 3, dtype=torch.float64)),
    "shape": put(0, torch.ones(5, 3)),
    "rank": put(0, torch.ones(1, 4, 3)),
    "strides": put(0, torch.ones(3, 4).t()),
    "layout": put(0, torch.ones(4, 3).to_sparse()),
    "conjugated": put_in(2, "a", torch.ones(3, dtype=torch.complex64).conj()),
    "no tensor": put(0, 1.0),
    "number": put(3, 3.0),
    "negative zero": put(3, -2.0),
    "class of the number": put(3, 2),
    "one tensor twice": lambda given: given[1].__setitem__(1, given[1][0]),
    "fewer": lambda given: given[1].pop(),
    "a tuple": lambda given: given.__setitem__(1, tuple(given[1])),
    "other keys": lambda given: given[2].__setitem__("c", given[2].pop("a")),
    "another dictionary": lambda given: given.__setitem__(2, OrderedDict(given[2])),
    "nested": put_in(2, "a", [torch.ones(3)]),
    "not None": put_in(2, "b", (torch.ones(3), torch.ones(3))),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_fitted_once_lets_nothing_else_pass(other: Callable[[list[Any]], object]) -> None:
    codegen = fxlib.capture(Bags(), sample_inputs=tuple(inputs()), how="export").graph._codegen
    assert isinstance(codegen, GuardedCodeGen)
    assert [codegen.misfit(inputs(), {}) for _ in range(3)] == ["", "", ""]
    misfit = codegen.misfit(edited(other), {})
    assert misfit
    assert codegen.misfit(edited(other), {}) == misfit


def test_a_remembered_export_computes_what_the_model_does() -> None:
    model = Bags()
    captured = fxlib.capture(model, sample_inputs=tuple(inputs()), how="export")
    for factor in (1, 2, 3):
        given = edited(put(0, torch.ones(4, 3) * factor))
        assert captured(*given).equal(model(*given))
