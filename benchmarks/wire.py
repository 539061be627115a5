"""The wire format against pickle: the round trip of one graph, to bytes and back to a module that can run.

Arms: `wire` (encode, serialize, parse, check, decode; with weights) and `pickle` (dumps, loads). Metric: seconds per
round trip, the arms in turn within one process; and the ratio of the two, pair by pair. Pickle executes what it reads
and loses in-place operators and metadata: it does less.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from benchmarks.report import Row, main, ratio_interval, row
from fxlib import wire

SIZES = {1_000: 15, 10_000: 11, 100_000: 3}
QUICK_SIZES = {1_000: 7, 10_000: 5}


def model(size: int) -> GraphModule:
    """A chain of functions, methods and modules, `size` nodes long, with arguments of the usual kinds."""
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])
    graph = Graph()
    x = y = graph.placeholder("x")
    for index in range(size - 2):
        match index % 5:
            case 0:
                y = graph.call_module(f"layers.{index % 8}", (y,))
            case 1:
                y = graph.call_function(torch.add, (y, x), {"alpha": 0.5})
            case 2:
                y = graph.call_method("view", (y, -1, 4))
            case 3:
                y = graph.call_function(torch.cat, ([y, x],), {"dim": 0})
            case _:
                y = graph.call_method("narrow", (y, 0, 0, 2))
    graph.output((y, {"last": y}))
    return GraphModule(root, graph)


def over_the_wire(module: GraphModule) -> GraphModule:
    """Encode and decode."""
    encoded = wire.encode(module, weights=True)
    return wire.decode(wire.parse(wire.serialize(encoded.graph)), blobs=encoded.blobs)


def through_pickle(module: GraphModule) -> GraphModule:
    """What a program would do without a wire format."""
    found: GraphModule = pickle.loads(pickle.dumps(module))  # noqa: S301 - it is what is compared
    return found


def seconds(program: Callable[[GraphModule], GraphModule], module: GraphModule) -> float:
    """Time one round trip. Garbage of the one before it is no part of it."""
    gc.collect()
    start = time.perf_counter()
    found = program(module)
    elapsed = time.perf_counter() - start
    assert len(found.graph.nodes) == len(module.graph.nodes)
    return elapsed


def measure(quick: bool) -> Sequence[Row]:
    """Measure every size."""
    rows: list[Row] = []
    for size, rounds in (QUICK_SIZES if quick else SIZES).items():
        module = model(size)
        assert torch.equal(over_the_wire(module)(torch.ones(2, 4))[0], module(torch.ones(2, 4))[0])
        pairs = [(seconds(over_the_wire, module), seconds(through_pickle, module)) for _ in range(rounds)]
        samples = {"wire": [ours for ours, _ in pairs], "pickle": [theirs for _, theirs in pairs]}
        rows += [
            row(benchmark="wire", case={"nodes": size}, arm=arm, metric="round_trip_seconds", unit="s", samples=values)
            for arm, values in samples.items()
        ]
        value, low, high = ratio_interval(samples["wire"], samples["pickle"])
        rows.append(
            Row(
                benchmark="wire",
                case={"nodes": size},
                arm="wire/pickle",
                metric="ratio",
                value=value,
                unit="",
                low=low,
                high=high,
                runs=rounds,
            )
        )
    return rows


if __name__ == "__main__":
    main("wire", measure, about="Round trip of a graph: the wire format against pickle.")
