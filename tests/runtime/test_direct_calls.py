"""Generated code calls `forward` of torch's modules where nobody could tell; here are those who could."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fxlib
from fxlib.errors import FxlibWarning

X = torch.linspace(-1, 1, 6).view(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def doubled(*values: Any) -> Any:
    return values[-1] * 2


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Doubles(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def patch_class(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 2)


def patch_call(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    call = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: call(self, *args) * 2)


CHANGES: dict[str, Callable[[Net, pytest.MonkeyPatch], Any]] = {
    "a hook": lambda model, _: model.second.register_forward_hook(doubled),
    "a hook before": lambda model, _: model.second.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a forward of its own": lambda model, _: setattr(model.second, "forward", lambda x: x * 3),
    "another class": lambda model, _: setattr(model.second, "__class__", Twice),
    "a parametrization": lambda model, _: parametrize.register_parametrization(model.second, "weight", Doubles()),
    "another module": lambda model, _: setattr(model, "second", Twice(3, 3)),
    "a compiled call": lambda model, _: setattr(model.second, "_compiled_call_impl", lambda x: x * 5),
    "another forward of the class": patch_class,
    "another way to call modules": patch_call,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_called_otherwise_after_the_capture_is_called_so(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)  # some weights give the second layer nothing but zeros
    model = Net()
    captured = fxlib.capture(model)
    before = model(X)
    assert torch.equal(captured(X), before)

    CHANGES[change](model, monkeypatch)

    assert not torch.equal(model(X), before)
    assert torch.equal(captured(X), model(X))


class HooksItself(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = hooks_itself(x)
        return super().forward(x)


MODELS: list[Net] = []


def hooks_itself(x: torch.Tensor) -> torch.Tensor:
    MODELS[0].second.register_forward_hook(doubled)
    return x + 0


@pytest.mark.slow
def test_a_leaf_that_gives_a_module_a_hook_while_the_forward_runs_is_heard() -> None:
    captured = fxlib.capture(model := HooksItself(), wrap=(hooks_itself,))
    plain = Net()
    plain.load_state_dict(model.state_dict())
    MODELS[:] = [model]

    with pytest.warns(FxlibWarning, match="hooks of its modules are not those at capture any more"):
        assert torch.equal(captured(X), plain(X) * 2)


def test_where_another_tracer_runs_modules_are_seen_as_modules() -> None:
    captured = fxlib.capture(Net())
    captured(X)

    class Inlines(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return not isinstance(m, torch.fx.GraphModule)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = captured

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)

    graph = Inlines().trace(Outer())

    assert [str(node.target) for node in graph.nodes if node.op == "call_module"] == ["inner.first", "inner.second"]


def calls_of_modules(model: nn.Module) -> int:
    with pytest.raises(RuntimeError, match="shapes") as failed:
        model(torch.ones(2, 5))
    return [each.name for each in traceback.extract_tb(failed.tb)].count("_call_impl")


def test_modules_are_called_directly_where_all_is_as_it_was() -> None:
    captured = fxlib.capture(model := Net())

    assert calls_of_modules(model) == 2
    assert calls_of_modules(captured) == 1
    model.first.register_forward_hook(doubled)
    assert calls_of_modules(captured) == calls_of_modules(model)
