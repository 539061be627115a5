"""Whether a graph was sent with the weights that passes need."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxlib
from fxlib import wire
from fxlib.errors import PassError
from fxlib.protocol import check_weights
from fxlib.recipes import recipes
from fxlib.v1 import graph_pb2


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.linear(x))
        return normed


@pytest.fixture
def graph() -> graph_pb2.Graph:
    return wire.encode(fxlib.capture(Normed().eval())).graph


def test_without_them_the_pass_the_tensor_the_node_and_its_line_are_named(graph: graph_pb2.Graph) -> None:
    with pytest.raises(PassError) as caught:
        check_weights(recipes.get("inference"), graph)
    assert caught.value.where == "fold_norms"
    text = str(caught.value)
    assert "without the values of 'linear.weight', which node 'linear' uses (" in text
    assert "test_weights.py:" in text
    assert "weights=True" in text


def test_a_pass_that_needs_none_takes_a_graph_without_them(graph: graph_pb2.Graph) -> None:
    check_weights(recipes.get("schedule"), graph)


def test_a_graph_with_all_of_them_passes() -> None:
    check_weights(recipes.get("inference"), wire.encode(fxlib.capture(Normed().eval()), weights=True).graph)


def test_a_tensor_of_no_elements_has_no_values_to_miss() -> None:
    model = nn.Sequential(nn.Identity())
    model.register_buffer("nothing", torch.empty(0))
    check_weights(recipes.get("inference"), wire.encode(fxlib.capture(model)).graph)
