"""`torch.compile` of captured and rewritten modules: no more graph breaks than of the original, and no word of ours."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc

import fxlib
from fxlib.recipes import recipes
from fxlib.runtime.gradients.plain_forward import train_as_written
from tests.runtime.remote_functions import read, read_log

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("servers")]


class Clicks(nn.Module):
    """Looks its columns up one after another, as such programs do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.top = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        # One by one: dynamo does not compile what stands around a loop in which it breaks the graph.
        a = rpc.rpc_sync("ps0", read, args=("a", ids[:, 0] + 1))
        b = rpc.rpc_sync("ps1", read, args=("b", ids[:, 1] + 1))
        c = rpc.rpc_sync("ps0", read, args=("c", ids[:, 2] + 1))
        d = rpc.rpc_sync("ps1", read, args=("d", ids[:, 3] + 1))
        return self.top(self.bottom(dense).relu() + torch.stack([a, b, c, d], 1))


class Local(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top, self.scale = nn.Linear(3, 1), 2.0

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        return self.top(dense).relu() * self.scale + ids.float().mean()


BATCH = (torch.randn(5, 3), torch.arange(20).view(5, 4))


def compiled(module: nn.Module) -> tuple[int, list[str]]:
    """How often dynamo breaks the graph, and what is said meanwhile."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        counter = CompileCounter()
        called: Any = torch.compile(module, backend=counter)
        results = [called(*BATCH)]
        graphs = counter.frame_count
        results.append(called(*BATCH))
        assert all(torch.equal(each, module(*BATCH)) for each in results)
    torch._dynamo.reset()
    return graphs - 1, [str(each.message) for each in said]


@pytest.mark.parametrize("model", [Clicks, Local])
def test_there_are_no_more_graph_breaks_than_in_the_original(model: type[nn.Module]) -> None:
    original, _ = compiled(model())
    assert original == (4 if model is Clicks else 0)
    for module in (fxlib.capture(model()), recipes.apply(fxlib.capture(model()), "training").module):
        breaks, said = compiled(module)
        assert breaks <= original
        assert said == []


def test_the_original_is_compiled_as_by_itself_and_nothing_is_said() -> None:
    model = Local()
    module = fxlib.capture(model)
    model.top.register_forward_hook(lambda _module, _given, result: result * 2)
    assert compiled(module) == (0, [])
    assert fxlib.usage(module).original


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which dynamo looks at
def test_gradients_are_pushed_as_they_are_uncompiled() -> None:
    found = []
    for wrap in (lambda each: each, lambda each: torch.compile(each, backend="eager")):
        module = recipes.apply(fxlib.capture(Clicks())).module
        called: Any = wrap(module)
        for _ in range(2):
            called(*BATCH).square().mean().backward()
            fxlib.push_gradients(module)
        found.append([rpc.rpc_sync(to, read_log) for to in ("ps0", "ps1")])
    assert found[0] == found[1]
    assert len(found[0][0]) == 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:Dynamo does not know")
def test_a_model_that_could_not_be_captured_is_pushed_for_though_it_is_compiled() -> None:
    found = []
    for wrap in (lambda each: each, lambda each: torch.compile(each, backend="eager")):
        model = Clicks()
        train_as_written(model, {})
        called: Any = wrap(model)
        for _ in range(2):
            called(*BATCH).square().mean().backward()
            fxlib.push_gradients(model)
        found.append([rpc.rpc_sync(to, read_log) for to in ("ps0", "ps1")])
    assert found[0] == found[1]
    assert len(found[0][0]) == 4


class Rated(Clicks):
    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        return self(*batch).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:a method of Rated")
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_forward_that_a_compiled_method_of_the_model_runs_is_pushed_for() -> None:
    found = []
    for wrap in (lambda each: each, lambda each: torch.compile(each, backend="eager")):
        module: Any = fxlib.capture(Rated())
        step = wrap(lambda *batch, module=module: module.loss(*batch))
        for _ in range(2):
            step(*BATCH).backward()
            fxlib.push_gradients(module)
        found.append([rpc.rpc_sync(to, read_log) for to in ("ps0", "ps1")])
    assert found[0] == found[1]
    assert len(found[0][0]) == 4
