"""A forward that keeps state in Python is refused, and what it changed is undone."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import CaptureError
from tests.capture.checks import same


class Stateful(nn.Module):
    def __init__(self, how: Callable[[nn.Module, Any], None]) -> None:
        super().__init__()
        self.how, self.steps, self.seen, self.cache = how, 0, [1], {"a": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.how(self, x)
        return x


def keep(module: Any, x: Any) -> None:
    module.last = x


def count(module: Any, x: Any) -> None:
    module.steps += 1


def append(module: Any, x: Any) -> None:
    module.seen.append(x)


def cache(module: Any, x: Any) -> None:
    module.cache["b"] = x


@pytest.mark.parametrize("how", [keep, count, append, cache])
def test_state_that_a_forward_keeps_is_refused_and_undone(how: Callable[[nn.Module, Any], None]) -> None:
    model = Stateful(how)
    before = {**model.__dict__, "seen": [1], "cache": {"a": 1}}

    with pytest.raises(CaptureError, match="one step would depend on the last"):
        fxlib.capture(model)

    assert model.__dict__ == before


class Switching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.eval()
        return self.norm(x)


def test_a_switch_of_the_training_mode_is_refused_and_undone() -> None:
    model = Switching()
    with pytest.raises(CaptureError, match="switches the training mode of BatchNorm1d"):
        fxlib.capture(model)
    assert model.training
    assert model.norm.training


def test_a_switch_that_changes_nothing_is_captured() -> None:
    model = Switching()
    model.norm.eval()
    same(model, torch.rand(4, 3))


def replace_a_buffer(module: Any) -> None:
    module._buffers["mean"] = torch.zeros(3)


def count_behind_the_back(module: Any) -> None:
    module.__dict__["steps"] += 1


def draw_from_its_own(module: Any) -> None:
    module.dice.random()


def draw_from_its_own_array(module: Any) -> None:
    module.numbers.random()


class Secretive(nn.Module):
    mean: torch.Tensor

    def __init__(self, how: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.how, self.steps, self.dice, self.numbers = how, 0, random.Random(3), np.random.default_rng(3)
        self.register_buffer("mean", torch.ones(3))

    @functools.cached_property
    def scale(self) -> float:
        return 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.how(self)
        return self.mean * x * self.scale


@pytest.mark.parametrize("how", [replace_a_buffer, count_behind_the_back, draw_from_its_own, draw_from_its_own_array])
def test_state_that_a_forward_keeps_behind_the_back_is_refused_and_undone(how: Callable[[nn.Module], None]) -> None:
    model, copied = Secretive(how), Secretive(how)
    mean = model.mean
    with pytest.raises(CaptureError, match="one step would depend on the last"):
        fxlib.capture(model)
    assert model.mean is mean
    assert model.steps == 0
    assert model.dice.random() == copied.dice.random()
    assert model.numbers.random() == copied.numbers.random()


def test_a_property_that_is_computed_once_is_no_state() -> None:
    model = Secretive(lambda _: None)
    fxlib.capture(model)
    assert "scale" not in model.__dict__
