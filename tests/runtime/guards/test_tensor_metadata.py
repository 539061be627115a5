"""What a graph was told of a model's tensors holds for these alone: with others, the original runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import FxlibWarning


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        dtype = next(self.parameters()).dtype
        return self.table(rows) + mask.to(dtype) * torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*at capture:fxlib.errors.FxlibWarning")
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("recipe", ["schedule", "training"])
def test_what_the_forward_was_told_of_weights_holds_for_these_alone(how: Any, recipe: str) -> None:
    model, batch = Masked(), [torch.tensor([1, 3]), torch.tensor([[1], [0]])]
    graph = fxlib.capture(model, sample_inputs=batch, how=how)
    fast = fxlib.optimize(graph, recipe=recipe)
    for change in (model.double, model.bfloat16, fast.half, fast.float):
        change()
        for each in (graph, fast, copy.deepcopy(fast)):
            assert each(*batch).dtype is model.table.weight.dtype
            assert torch.equal(each(*batch), model(*batch))


def test_a_weight_cut_down_in_its_own_memory_is_another() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * next(self.parameters()).shape[0] + self.weight.sum()

    model, x = Counted(), torch.ones(2)
    graph = fxlib.capture(model)
    assert torch.equal(graph(x), model(x))
    model.weight.data = model.weight.data[:2]
    with pytest.warns(FxlibWarning, match="shape or strides of weight"):
        assert torch.equal(graph(x), model(x))


def test_an_export_is_for_weights_that_lie_as_they_did() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).exp()

    model, x = Flat(), torch.randn(1, 2, 3, 3)
    graph = fxlib.capture(model, sample_inputs=[x], how="export")
    model.layer.weight.data = model.layer.weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.warns(FxlibWarning, match="strides of layer.weight are not what they were at capture"):
        assert torch.equal(graph(x), model(x))


def test_a_file_bound_to_a_model_holds_for_the_weights_it_was_bound_to(tmp_path: Path) -> None:
    model, batch = Masked(), [torch.tensor([1, 3]), torch.tensor([[1], [0]])]
    fxlib.save(fxlib.capture(model), tmp_path / "model.fxg")
    loaded = fxlib.load(tmp_path / "model.fxg", root=model)
    assert torch.equal(loaded(*batch), model(*batch))
    model.half()
    with pytest.warns(FxlibWarning, match="dtype"):
        assert loaded(*batch).dtype is torch.half
