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


def test_the_time_grows_with_the_number_of_remote_calls_alone() -> None:
    def calling(count: int) -> Any:
        return lambda x: sum(rpc_sync(f"ps{i % 2}", servers.lookup, ("t", x)) for i in range(count))

    captured = fxlib.capture(calling(1000))

    assert len(captured.graph.nodes) == 2002
    few_s, many_s = (min(seconds(fxlib.capture, calling(count)) for _ in range(3)) for count in (100, 1000))
    assert many_s < 30 * few_s
