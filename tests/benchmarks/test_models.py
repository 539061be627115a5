"""The benchmark of models that nobody here wrote: what it finds of one, and how it counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import models
from benchmarks.zoo_parts.check_model import Found, check
from fxlib import Workload

pytestmark = pytest.mark.slow

X = torch.linspace(-1, 1, 12).view(3, 4)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x * self.calls


def make(net: str, training: bool = False) -> tuple[nn.Module, Workload]:
    made = {"net": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout()), "counting": Counting()}
    return made[net].train(training), Workload(batches=[X], mode="forward")


def test_a_model_is_sent_and_rewritten_as_the_program_that_it_is() -> None:
    found = check(make, "net")
    assert (found.captured, found.problems) == ("traced", [])
    assert found.same_on_wire
    assert found.same_in_training
    assert found.within
    assert found.error is not None
    assert 0 < found.error < 1e-5
    assert min(found.eager_us + found.captured_us + found.guards_us) > 0


def test_a_refused_model_has_a_row_with_the_line() -> None:
    found = check(make, "counting")
    assert found.captured == "refused"
    assert not any((found.same_on_wire, found.same_in_training, found.within))
    assert "test_models.py:" in found.problems[0]
    (case,) = {str(dict(each.case)) for each in models.rows("family/counting", found)}
    assert "test_models.py:" in case


def test_a_model_that_cannot_be_made_ends_its_own_process() -> None:
    found = models.check("pytorchcv", "no_such_net")
    assert found.captured == "not made"
    assert "no_such_net" in found.problems[0]


def test_models_are_counted_by_package_and_all_together() -> None:
    good = Found(captured="traced", same_on_wire=True, same_in_training=True, within=True)
    good.eager_us, good.captured_us, good.guards_us = [10.0] * 3, [9.0] * 3, [1.0] * 3
    measured = [*models.rows("a/one", good), *models.rows("b/two", Found(captured="refused"))]
    counted = {(each.case["package"], each.arm, each.metric): each.value for each in models.summary(measured)}
    assert counted["all", "models", "models"] == 2
    assert counted["b", "models", "refused"] == 1
    assert counted["all", "models", "training same_bits"] == 1
    assert counted["all", "guards/eager", "median ratio"] == pytest.approx(0.1)
