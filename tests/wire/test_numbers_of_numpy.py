"""Numbers of NumPy's and of enums travel as Python's own, which stand for them exactly."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fxlib
from fxlib import wire


class Axis(enum.IntEnum):
    ROWS = 0
    COLUMNS = 1


class Sized(nn.Module):
    """As configurations read from files and data frames size their layers."""

    scale: Any
    most: Any

    def __init__(self) -> None:
        super().__init__()
        numbers: Any = np
        self.rows = nn.EmbeddingBag(numbers.int64(10), 4, mode="sum")
        self.top = nn.Linear(numbers.int32(4), numbers.int64(3))
        self.norm = nn.LayerNorm(numbers.int64(3), eps=numbers.float64(1e-5))
        self.drop = nn.Dropout(numbers.float32(0.0))
        self.scale, self.most = np.float32(0.1), np.int64(2)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.drop(self.norm(self.top(self.rows(rows)))) * self.scale + np.float64(2)
        found: Tensor = x.clamp(max=self.most).sum(dim=Axis.COLUMNS, keepdim=True)
        return found


def test_modules_and_arguments_with_numbers_of_numpy_are_captured_sent_and_run_alone() -> None:
    model, rows = Sized(), torch.randint(10, (5, 3))
    captured = fxlib.capture(model)
    assert torch.equal(captured(rows), model(rows))
    encoded = wire.encode(captured, weights=True)
    assert not [module.opaque for module in encoded.graph.modules if module.WhichOneof("kind") == "opaque"]
    alone = wire.decode(wire.parse(wire.serialize(encoded.graph)), blobs=encoded.blobs)
    assert torch.equal(alone(rows), model(rows))
    assert type(vars(alone.get_submodule("rows"))["num_embeddings"]) is int


def test_an_export_takes_them_too() -> None:
    model, rows = Sized(), torch.randint(10, (5, 3))
    captured = fxlib.capture(model, sample_inputs=[rows], how="export")
    assert torch.equal(captured(rows), model(rows))
    assert torch.equal(wire.decode(wire.encode(captured).graph, root=captured)(rows), model(rows))
