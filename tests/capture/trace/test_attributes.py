"""An attribute of a traced tensor is a tensor like others: asked for its class, its shape, and written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxlib
from fxlib.errors import CaptureError

X = torch.arange(12.0).reshape(3, 4)


def asks_for_the_class(x: Tensor) -> Any:
    y: Any = x.T
    return y * 2 if isinstance(y, Tensor) else y * 3


def has_the_shape_from_before(x: Tensor) -> Any:
    y = x.data
    shape = y.shape
    y.unsqueeze_(0)
    return y * shape[0], shape[0], y.ndim


def has_the_view_from_before(x: Tensor) -> Tensor:
    y = x.T.data
    before = y.T
    y.unsqueeze_(0)
    return before + 1


@pytest.mark.parametrize("program", [asks_for_the_class, has_the_shape_from_before, has_the_view_from_before])
def test_what_is_asked_of_an_attribute_is_answered_as_of_the_tensor(program: Callable[[Tensor], Any]) -> None:
    expected, found = program(X.clone()), fxlib.capture(program)(X.clone())
    parts = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in parts)


def assigns_data(x: Tensor) -> Tensor:
    y = x.T
    y.data = torch.zeros(4, 3)
    return y * 2


def assigns_a_flag(x: Tensor) -> Tensor:
    y = x.data
    y.requires_grad = True
    return y * 2


@pytest.mark.parametrize("program", [assigns_data, assigns_a_flag])
def test_an_assignment_to_an_attribute_of_it_is_refused(program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="the forward assigns"):
        fxlib.capture(program)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> Any:
        found: Any = self.cell(x)
        return found[0] if isinstance(found, tuple) else found


def nonzero(x: Tensor) -> Any:
    found: Any = x.nonzero(as_tuple=True)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("program", [Cell(), nonzero])
def test_what_returns_several_tensors_is_not_taken_for_one(program: Any) -> None:
    with pytest.raises(CaptureError, match="the class of a traced value"):
        fxlib.capture(program)
