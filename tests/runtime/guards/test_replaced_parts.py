"""What stood in one place at capture, and another thing stands there now: the original runs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxlib

pytestmark = pytest.mark.slow

X = torch.randn(3, 4)


class Tied(nn.Module):
    first: torch.Tensor
    second: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("first", torch.ones(4))
        self.register_buffer("second", self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.a(x), self.b.weight) + self.second


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.a.register_forward_hook(lambda _, __, out: out * 2)
        self.b = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def assigned(model: Any) -> None:
    made = torch.Generator().manual_seed(1)
    model.load_state_dict({k: torch.randn(v.shape, generator=made) for k, v in model.state_dict().items()}, assign=True)


def other_hook(model: Any) -> None:
    (number,) = model.a._forward_hooks
    model.a._forward_hooks[number] = lambda _, __, out: out * 3


CHANGES: dict[str, tuple[type[nn.Module], Callable[[Any], object]]] = {
    "tied parameters loaded apart": (Tied, assigned),
    "one tied parameter replaced": (Tied, lambda m: setattr(m.b, "weight", nn.Parameter(torch.ones(4, 4)))),
    "one tied buffer replaced": (Tied, lambda m: setattr(m, "second", torch.zeros(4))),
    "all hooks removed by a new table": (Hooked, lambda m: setattr(m.a, "_forward_hooks", OrderedDict())),
    "a hook replaced under its number": (Hooked, other_hook),
    "children replaced by a new table": (Hooked, lambda m: setattr(m.b, "_modules", {"0": nn.Linear(4, 4)})),
}


@pytest.mark.parametrize("rewritten", [False, True], ids=["captured", "rewritten"])
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning", "ignore:.*LeafSpec:FutureWarning")
def test_the_original_runs(case: str, how: Any, rewritten: bool) -> None:
    kind, change = CHANGES[case]
    torch.manual_seed(0)
    model = kind()
    captured: Any = fxlib.capture(model, sample_inputs=[X] if how == "export" else None, how=how)
    used = fxlib.optimize(captured, recipe="training") if rewritten else captured
    copied = copy.deepcopy(used)
    before = used(X)
    torch.manual_seed(2)
    change(model)
    assert torch.equal(used(X), model(X))
    assert not torch.equal(used(X), before)
    assert torch.equal(copied(X), before)


@pytest.fixture
def patched() -> Iterator[None]:
    original = nn.Linear.__dict__.get("_call_impl")
    yield
    if original is None:
        del nn.Linear._call_impl


@pytest.mark.usefixtures("patched")
def test_a_class_that_is_called_otherwise_is_called_otherwise() -> None:
    model = Tied()
    captured = fxlib.capture(model)
    captured(X)

    def doubled(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) * 2

    nn.Linear._call_impl = doubled  # type: ignore[method-assign, assignment]
    assert torch.equal(captured(X), model(X))
