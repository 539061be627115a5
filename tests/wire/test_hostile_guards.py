"""Guards of exported graphs are bounded, and hold whatever the sizes are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxlib
from fxlib import wire
from fxlib.errors import CaptureError, WireError
from fxlib.v1 import graph_pb2 as pb


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1) if x.shape[0] % 2 == 0 else x


def sent() -> pb.Graph:
    captured = fxlib.capture(Halves(), sample_inputs=[torch.ones(8)], dynamic_shapes=({0: torch.export.Dim.AUTO},))
    return wire.encode(captured).graph


def condition_of(graph: pb.Graph) -> pb.Values:
    graph.modules[-1].graph.pytree.guards.ClearField("conditions")
    condition: pb.Values = graph.modules[-1].graph.pytree.guards.conditions.add().tuple
    return condition


def test_an_expression_has_so_many_parts_at_most() -> None:
    graph = sent()
    condition = condition_of(graph)
    condition.items.add().text = "mul"
    for _ in range(300):
        condition.items.add().integer = (1 << 63) - 1
    with pytest.raises(WireError, match="an expression has 301 parts, and may have 256"):
        wire.decode(graph)


def test_an_expression_that_divides_by_zero_holds_for_no_input() -> None:
    graph = sent()
    condition = condition_of(graph)
    condition.items.add().text = "mod"
    condition.items.add().integer = 1
    condition.items.add().integer = 0
    with pytest.raises(CaptureError, match="a size is 0 that others were divided by"):
        wire.decode(graph)(torch.ones(8))
