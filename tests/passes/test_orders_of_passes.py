"""Passes keep to what passes before them left of the program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxlib
from fxlib.recipes import recipes


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x).sigmoid()
        return y.exp() * torch.sqrt(self.get_buffer("scale"))


@pytest.mark.slow
def test_gradients_may_be_recorded_where_values_were_computed_from_buffers_alone() -> None:
    model, x = Scaled().eval(), torch.randn(2, 3)
    captured = fxlib.capture(model, sample_inputs=[x], how="export")
    chosen = recipes.from_passes([("fold_constants", {}), ("reinplace", {})])
    rewrite = recipes.apply(captured, chosen)
    assert rewrite.passes[0].changes == 1
    assert fxlib.verify(model, rewrite.module, [x])
