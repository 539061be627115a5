"""The schedule recipe on graphs of growing size, against the time that stock tracing takes for the same graph.

One node in a hundred is a remote call. Arms: `schedule` (`fxlib.recipes.apply`: copy, all passes and their checks,
recompile) and `symbolic_trace` (`torch.fx.symbolic_trace` of the model that the graph was traced from). Metrics:
seconds, the arms in turn within one process; the ratio of the two, pair by pair; and microseconds per node, which stay
level if time grows in proportion to nodes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace, wrap
from torch.nn import functional as F

from benchmarks.report import Row, main, ratio_interval, row
from fxlib import recipes
from fxlib.contracts import Contract
from fxlib.runtime import CapturedModule, remote_call

SIZES = {1_000: 15, 10_000: 9, 100_000: 3}
QUICK_SIZES = {1_000: 7, 10_000: 5}
CALL_EVERY = 100
READ = Contract(reads=frozenset({"tables"}))


@wrap
def lookup(server: str, ids: torch.Tensor) -> torch.Tensor:
    """Stand in for a remote call while stock tracing looks on."""
    raise NotImplementedError(server, ids)


class Model(nn.Module):
    """A chain of functions, methods, modules and writes in place; results of calls join it 50 nodes later."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pending = x
        for place in range(self.size):
            if place % CALL_EVERY == 0:
                pending = lookup(f"ps{place // CALL_EVERY % 4}", ids)
            elif place % CALL_EVERY == 50:
                x = x + pending
            else:
                x = self.work(place, x)
        return x

    def work(self, place: int, x: torch.Tensor) -> torch.Tensor:
        if place % 5 == 0:
            return self.layers[place % 8](x)
        if place % 5 == 1:
            return x.view(-1, 4)
        if place % 5 == 2:
            return torch.add(x, x, alpha=0.5)
        return F.relu(x, inplace=True) if place % 5 == 3 else torch.tanh(x)


def captured(traced: GraphModule) -> CapturedModule:
    """Turn the stand-ins into remote calls."""
    for node in traced.graph.nodes:
        if node.target is lookup:
            node.target, node.args = remote_call, (node.args[0], "shop:lookup", node.args[1:], {}, None)
            node.meta["contract"] = READ
    return CapturedModule(traced, traced.graph)


def seconds(run: Callable[[], object]) -> float:
    """Time one run. Garbage of the one before it is no part of it."""
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(quick: bool) -> Sequence[Row]:
    """Measure every size."""
    sizes = QUICK_SIZES if quick else SIZES
    return [each for size, rounds in sizes.items() for each in measure_size(size, rounds)]


def measure_size(size: int, rounds: int) -> Iterator[Row]:
    """Measure one size, the arms in turn."""
    model = Model(size)
    module = captured(symbolic_trace(model))
    moved = sum(call.action == "moved" for call in recipes.apply(module).calls)
    assert moved == size // CALL_EVERY
    pairs = [(seconds(lambda: recipes.apply(module)), seconds(lambda: symbolic_trace(model))) for _ in range(rounds)]
    ours, stock = [first for first, _ in pairs], [second for _, second in pairs]
    nodes = len(module.graph.nodes)
    case = {"nodes": nodes, "calls": moved}
    for arm, samples in (("schedule", ours), ("symbolic_trace", stock)):
        per_node = [1e6 * each / nodes for each in samples]
        yield row(benchmark="passes", case=case, arm=arm, metric="seconds", unit="s", samples=samples)
        yield row(benchmark="passes", case=case, arm=arm, metric="per_node", unit="us", samples=per_node)
    value, low, high = ratio_interval(ours, stock)
    ratio = {"arm": "schedule/symbolic_trace", "metric": "ratio", "unit": ""}
    yield Row(benchmark="passes", case=case, value=value, low=low, high=high, runs=rounds, **ratio)


if __name__ == "__main__":
    main("passes", measure, about="Time of the schedule recipe, against stock tracing of the same graph.")
