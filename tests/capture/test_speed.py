"""Capturing costs about what `torch.fx.symbolic_trace` does."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.rpc import rpc_sync

import fxlib
from tests.capture import servers

pytestmark = pytest.mark.slow


class Chain(nn.Module):
    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.steps, self.linear = nodes // 4, nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.steps):
            x = self.linear(torch.relu(x).sigmoid() + self.weight)
        return x


def seconds(trace: Callable[[nn.Module], Any], model: nn.Module) -> float:
    start = time.thread_time()
    trace(model)
    return time.thread_time() - start


def test_a_node_takes_no_more_than_a_few_times_that_of_stock_tracing() -> None:
    nodes = 2_000
    model = Chain(nodes)
    rounds = [(seconds(fxlib.capture, model), seconds(torch.fx.symbolic_trace, model)) for _ in range(3)]
    ours, stock = (min(column) for column in zip(*rounds, strict=True))

    print(f"µs a node: capture {ours / nodes * 1e6:.1f}, symbolic_trace {stock / nodes * 1e6:.1f}")
    assert ours < 6 * stock  # about 2.5 on a quiet machine


def test_a_small_model_takes_no_more_than_a_few_times_that_of_stock_tracing() -> None:
    model = Chain(8)
    rounds = [(seconds(fxlib.capture, model), seconds(torch.fx.symbolic_trace, model)) for _ in range(10)]
    ours, stock = (min(column) for column in zip(*rounds, strict=True))

    print(f"ms: capture {ours * 1e3:.1f}, symbolic_trace {stock * 1e3:.1f}")
    assert ours < 10 * stock  # about 3 on a quiet machine


class Settings:
    """An object whose attributes are read by a method of its own, as the configurations of transformers' models are."""

    scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.settings.scale if x.sum().shape == () else x


def test_a_model_whose_settings_have_a_way_of_their_own_to_be_read_is_exported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fxlib.capture(nn.ReLU(), sample_inputs=(torch.ones(3),), how="export")  # imports run finders of pytest's
    exported, export = list[nn.Module](), torch.export.export

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        exported.append(module)
        return export(module, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    captured = fxlib.capture(Deciding(), sample_inputs=(torch.ones(3),), how="export")
    assert torch.equal(captured(torch.ones(3)), 2.0 * torch.ones(3))
    assert len(exported) == 1


def test_the_time_grows_with_the_number_of_remote_calls_alone() -> None:
    def calling(count: int) -> Any:
        return lambda x: sum(rpc_sync(f"ps{i % 2}", servers.lookup, ("t", x)) for i in range(count))

    captured = fxlib.capture(calling(1000))

    assert len(captured.graph.nodes) == 2002
    few_s, many_s = (min(seconds(fxlib.capture, calling(count)) for _ in range(3)) for count in (100, 1000))
    assert many_s < 30 * few_s
