"""Code of the program's own that a graph runs in mid-step: what it changes behind the checks is no secret."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.rpc import rpc_sync
from torch.nn import functional as F

import fxlib
from fxlib.errors import FxlibWarning
from fxlib.runtime import CapturedModule
from fxlib.runtime.own_code import running_own_code
from fxlib.runtime.submodules import is_torchs_value

pytestmark = pytest.mark.usefixtures("servers")
X = torch.linspace(-1, 1, 4)
MODELS: list[Any] = []
"""The model that the program's code changes; empty if it changes none."""


@pytest.fixture(autouse=True)
def _changes_nothing() -> Iterator[None]:
    yield
    MODELS.clear()


def touch() -> None:
    for each in MODELS:
        each.rate += 1.0


@torch.fx.wrap
def whole(x: torch.Tensor) -> torch.Tensor:
    touch()
    return x * 1


class Same(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        touch()
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0]


class Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        touch()
        return x * 1


class Answer:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def get(self) -> torch.Tensor:
        touch()
        return self.value


def answer(x: torch.Tensor) -> list[Answer]:
    return [Answer(x)]


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.rate, self.leaf = way, 2.0, Leaf()

    def forward(self, x: torch.Tensor) -> Any:
        if self.way == "a function":
            x = whole(x)
        elif self.way == "an autograd function":
            x = Same.apply(x)  # type: ignore[no-untyped-call]
        elif self.way == "a module":
            x = self.leaf(x)
        else:
            x = rpc_sync("ps0", answer, args=(x,))[0].get()
        return x * self.rate


@pytest.mark.parametrize("way", ["a function", "an autograd function", "a module", "a remote result"])
def test_what_code_of_the_programs_own_changes_in_mid_step_is_told_and_the_original_runs_from_then_on(way: str) -> None:
    model = Model(way)
    captured: CapturedModule = fxlib.capture(model, leaf_modules=(Leaf,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(captured(X), X * 2)
    MODELS.append(model)
    with pytest.warns(FxlibWarning, match=r"rate is not what it was at capture any more.* code of the program's own"):
        assert torch.equal(captured(X), X * 3)
    assert torch.equal(captured(X), X * 4)


@pytest.mark.parametrize("namespace, own", [("fxlib", False), ("fxlib_of_a_program", True)])
def test_this_librarys_operators_are_no_code_of_the_programs_own(namespace: str, own: bool) -> None:
    library = torch.library.Library("fxlib_of_a_program", "FRAGMENT")
    library.define("quantize(Tensor x, float scale, int zero_point) -> Tensor")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(getattr(torch.ops, namespace).quantize.default, (x, 1.0, 0)))
    assert bool(list(running_own_code(torch.fx.GraphModule(nn.Module(), graph)))) is own


@pytest.mark.parametrize("home", ["math_utils", "operators", "torch_utils", "torchrec.sparse"])
def test_a_function_is_the_programs_own_though_its_modules_name_begins_as_torchs_or_pythons(home: str) -> None:
    def kept(x: torch.Tensor) -> torch.Tensor:
        return x

    kept.__module__ = home
    graph = torch.fx.Graph()
    graph.output(graph.call_function(kept, (graph.placeholder("x"),)))
    assert list(running_own_code(torch.fx.GraphModule(nn.Module(), graph)))


def test_an_activation_is_the_programs_own_though_its_modules_name_begins_as_torchs() -> None:
    def activation(x: torch.Tensor) -> torch.Tensor:
        return x

    activation.__module__ = "torch_utils"
    assert not is_torchs_value(activation)
    assert is_torchs_value(F.relu)
