"""Parts that a program gives the root of a captured module, by attributes or otherwise, are the original's, too."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import fxlib

X = torch.randn(3, 4)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Other(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(4, 4)
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.helper(self.inner(x))) @ self.w

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x


def times(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 5


CHANGES: dict[str, Callable[[Any], object]] = {
    "a layer replaced in the table": lambda m: m._modules.__setitem__("last", nn.Sequential(m.last, nn.ReLU())),
    "a layer added anew": lambda m: m.add_module("last", nn.Sequential(m.last, nn.ReLU())),
    "a block of another class": lambda m: m._modules.__setitem__("inner", Other()),
    "a block that is left out": lambda m: m.register_module("inner", nn.Identity()),
    "a new buffer": lambda m: m.register_buffer("steps", torch.ones(1)),
    "a new buffer that is not saved": lambda m: m.register_buffer("steps", torch.ones(1), persistent=False),
    "a new parameter": lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "a method bound by hand": lambda m: setattr(m, "helper", types.MethodType(times, m)),
    "no method": lambda m: setattr(m, "helper", None),
    "pruned": lambda m: prune.l1_unstructured(m, "w", 0.5),
    "with a norm of its weight": lambda m: weight_norm(m, "w"),
    "with a spectral norm": lambda m: spectral_norm(m, "w"),
}


def outcome(module: nn.Module, *, grad: bool) -> Any:
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad):
        try:
            return module(X)
        except (TypeError, AttributeError) as error:
            return type(error)


@pytest.mark.parametrize("copied", [False, True], ids=["captured", "copied"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning", "ignore:.*is deprecated:FutureWarning")
def test_what_is_changed_on_the_captured_module_is_changed_as_on_the_model(
    change: Callable[[Any], object], *, copied: bool
) -> None:
    model = Model()
    theirs = copy.deepcopy(model)
    ours: Any = fxlib.capture(model)
    ours = copy.deepcopy(ours) if copied else ours
    ours(X)
    for each in (theirs, ours):
        torch.manual_seed(1)
        change(each)
    for grad in (True, False):
        expected, found = outcome(theirs, grad=grad), outcome(ours, grad=grad)
        assert torch.equal(expected, found) if isinstance(expected, torch.Tensor) else found is expected
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert {name for name, _ in ours.named_buffers()} == {name for name, _ in theirs.named_buffers()}


def test_what_a_graph_needs_is_not_given_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with torch.no_grad():
        fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
        fast(X)
        fast.add_module("2", nn.ReLU())
        fast.double()(X.double())
    assert list(model._modules) == ["0", "1", "2"]
    assert not model._buffers
    assert fast._buffers


def test_a_tensor_that_stands_in_for_a_parameter_for_a_while_is_not_given_to_the_model() -> None:
    model = Model()
    ours = fxlib.capture(model)
    weights = {name: value.detach() * 2 for name, value in ours.named_parameters()}
    torch.func.functional_call(ours, weights, (X,))
    torch.func.grad(lambda given: torch.func.functional_call(ours, given, (X,)).sum())(weights)
    torch.export.export(nn.Sequential(ours), (X,))
    assert all(type(each) is nn.Parameter for each in model.parameters())
    assert torch.equal(ours(X), model(X))


def test_what_is_deleted_of_the_model_is_gone_from_the_captured_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    ours: Any = fxlib.capture(model)
    del ours[1]
    assert list(ours.state_dict()) == list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    del model[1]
    assert list(ours.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
def test_a_captured_sequence_gives_its_parts_as_the_sequence_does() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    ours: Any = fxlib.capture(model)
    for each in (ours, copy.deepcopy(ours)):
        assert len(each) == 2
        assert list(each)[1] is each[1]
        each[1] = nn.ReLU()
        each.append(nn.Sigmoid())
        assert torch.equal(each(X), torch.sigmoid(torch.relu(each[0](X))))
    assert [type(part) for part in model] == [nn.Linear, nn.ReLU, nn.Sigmoid]
    assert not hasattr(type(fxlib.capture(nn.Linear(4, 4))), "__len__")
