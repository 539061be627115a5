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


class Meter:
    """An object of the program's own, with a method that a tensor has, too."""

    def __init__(self) -> None:
        self.last = torch.zeros(4)

    def add(self, x: Tensor) -> Tensor:
        self.last = self.last + x
        return self.last


def has_the_object_from_before(x: Tensor, meter: Meter) -> Tensor:
    before = meter.last
    after = meter.add(x)
    return before * 10 + after


def test_an_attribute_of_an_object_is_read_before_a_method_changes_it() -> None:
    captured = fxlib.capture(has_the_object_from_before)
    for program in (captured, fxlib.optimize(captured, recipe="training")):
        assert torch.equal(program(X, Meter()), has_the_object_from_before(X, Meter()))


def turns_a_new_tensor(x: Tensor) -> Any:
    made = torch.zeros(2, 3)
    made.t_()
    return x * made.shape[0], x * made.size(1), torch.zeros(made.shape)


def resizes_a_new_tensor(x: Tensor) -> Any:
    made = torch.zeros(3)
    made.resize_(2, 2)
    return x * made.numel() + made.dim()


def gives_a_new_tensor_another_size_by_out(x: Tensor) -> Any:
    made = torch.zeros(0)
    torch.cat([x, x], out=made)
    return x * made.shape[0], made.ndim


@pytest.mark.parametrize("program", [turns_a_new_tensor, resizes_a_new_tensor, gives_a_new_tensor_another_size_by_out])
def test_a_tensor_that_is_reshaped_in_place_has_its_new_shape(program: Callable[[Tensor], Any]) -> None:
    expected, found = program(X.clone()), fxlib.capture(program)(X.clone())
    parts = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in parts)


class Counts(nn.Module):
    """Counts its steps in a tensor that is no buffer."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.steps, self.ask = torch.zeros(1), ask

    def forward(self, x: Tensor) -> Any:
        self.steps.add_(1)
        return x + self.ask(self.steps)


class Grows(Counts):
    def forward(self, x: Tensor) -> Any:
        self.steps.unsqueeze_(0)
        return x + self.ask(self.steps)


def asks_whether_zeros_take_a_gradient(x: Tensor) -> Tensor:
    made = torch.zeros(3, 4)
    made.add_(x.requires_grad_())
    return x + 1 if made.requires_grad else x - 1


@pytest.mark.parametrize(
    "program",
    [Counts(int), Counts(Tensor.item), Grows(Tensor.dim), asks_whether_zeros_take_a_gradient],
)
def test_what_a_write_before_has_changed_is_not_answered_as_without_it(program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"writes to a tensor that is no buffer|decides which way"):
        fxlib.capture(program)
