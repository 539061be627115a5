"""Generated code reaches submodules through a cache: they are the model's own modules, whatever becomes of these."""

from __future__ import annotations

import copy

import torch
from torch import nn

import fxlib
from fxlib.runtime import CapturedModule


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.scale + block[0].weight.sum()  # type: ignore[index]
        return x


def test_a_captured_module_runs_on_the_modules_that_it_has_now() -> None:
    torch.manual_seed(0)
    model = Deep()
    captured, x = fxlib.capture(model), torch.randn(4, 3)
    assert torch.equal(captured(x), model(x))
    model.blocks[0][0].weight = nn.Parameter(torch.ones(3, 3))  # type: ignore[index]
    model.scale = nn.Parameter(torch.full((1,), 2.0))
    assert torch.equal(captured(x), model(x))
    model.blocks[1] = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert torch.equal(captured(x), model(x))


def test_without_an_original_a_module_that_is_replaced_counts_too() -> None:
    model = Deep().eval()
    alone = CapturedModule(model, copy.deepcopy(fxlib.capture(model).graph))
    x = torch.randn(4, 3)
    before = alone(x)
    alone.blocks[0][0] = nn.Linear(3, 3)
    assert not torch.equal(alone(x), before)


def test_a_copy_runs_on_modules_of_its_own() -> None:
    model = Deep().eval()
    captured, x = fxlib.capture(model), torch.randn(4, 3)
    before = captured(x)
    copied = copy.deepcopy(captured)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1.0)
    assert torch.equal(captured(x), before)
    assert not torch.equal(copied(x), before)


def test_hooks_of_a_submodule_see_the_submodule() -> None:
    captured, seen = fxlib.capture(Deep().eval(), leaf_modules=(nn.Linear,)), list[nn.Module]()
    captured(torch.randn(4, 3))
    linear = captured.blocks[0][0]
    handle = linear.register_forward_hook(lambda module, *_: seen.append(module))
    captured(torch.randn(4, 3))
    handle.remove()
    assert seen == [linear]
