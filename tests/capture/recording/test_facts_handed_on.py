"""What a forward hands on is watched: to operators, to functions written in C, with a star, and out of the forward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import CaptureError, FxlibWarning

X = torch.linspace(-2, 2, 12).view(3, 4)


class Held:
    def __init__(self) -> None:
        self.value = 3.0


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.dims, self.shape, self.factors = [0], [4, 3], [2.0]
        self.array = np.array([1.0, 2.0])
        self.add: Any = np.add
        self.held = Held()

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)

    def change(self) -> None:
        self.dims[0], self.shape[:], self.factors[0] = 1, [2, 6], 9.0
        self.array[0], self.add, self.held.value = 9.0, np.subtract, 7.0


def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


FORWARDS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "an operator": lambda m, x: x.sum(m.dims),
    "an operator, with a star": lambda m, x: x.view(*m.shape),
    "a function, with a star": lambda m, x: times(x, *m.factors),
    "a function of NumPy's": lambda m, x: x * float(np.sum(m.array)),
    "an object of NumPy's": lambda m, x: x * float(m.add(1, 2)),
    "an attrgetter": lambda m, x: x * operator.attrgetter("held.value")(m),
}


@pytest.mark.parametrize("place", FORWARDS)
def test_what_a_forward_hands_to(place: str) -> None:
    model = Model(FORWARDS[place])
    captured = fxlib.capture(model)
    assert alike(captured(X), model(X))
    model.change()
    assert alike(captured(X), model(X))


def alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return all(map(alike, found, expected))
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else bool(found == expected)


class Optionally(nn.Module):
    def forward(self, x: torch.Tensor, scale: Any) -> Any:
        return x * 2 if scale is None else x * scale


def test_facts_of_arguments_hold_where_no_other_state_is_read() -> None:
    captured = fxlib.capture(Optionally())
    with pytest.warns(FxlibWarning, match="the argument scale is None"):
        assert torch.equal(captured(X, None), X * 2)
    assert torch.equal(captured(X, X), X * X)


class Doubled(nn.Module):
    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_a_model_that_is_called_otherwise_than_by_its_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match="__call__"):
        fxlib.capture(Doubled())
