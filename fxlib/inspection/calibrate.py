"""Measures what the roofline needs to know about this processor, with as many threads as torch uses now.

Cases of all kinds of work take turns, short cases with short ones and long cases with long ones, so that each finds the
processor's caches as it would in a program; results go to fresh memory. The shortest time of each case counts, because
anything else that runs on the machine can only add to it.

Each kind of work has cases from tiny to large, with shapes that are common in models. The cases of one kind differ in
arithmetic, in elements and in the ratio of the two, so that the costs of both can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np
import torch
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

from fxlib.inspection.device import Bandwidth, Device, Peak
from fxlib.inspection.operations import WORK, Operation, Operations
from fxlib.inspection.tensor_facts import number
from fxlib.utils.hardware import memory_bytes, processor

Work = Callable[[], object]

NODES = 32
"""Number of nodes in each graph of `graphs`."""


def cases(dtype: torch.dtype) -> Iterator[Work]:
    """Yield the cases of one dtype: all kinds in float32, the kinds that do arithmetic in other dtypes."""
    yield from _products(dtype)
    yield from _convolutions(dtype)
    if dtype is torch.float32:
        yield from _normalizations()
        yield from _reductions()
        yield from _elementwise()
        yield from _lookups()


def graphs() -> dict[str, Work]:
    """Return graphs of equally many nodes that differ in their kind of node; the time differences are call costs."""
    return {
        kind: partial(_graph(kind), torch.ones(8)) for kind in ("view", "function", "layer", "overload", "attribute")
    }


def copies() -> dict[int, Work]:
    """Return cases that copy into fresh memory, by the bytes that each reads and writes."""
    return {2 * 4 * elements: torch.ones(elements).clone for elements in (4**power for power in range(6, 13))}


def _products(dtype: torch.dtype) -> Iterator[Work]:
    make = partial(torch.ones, dtype=dtype)
    for rows, wide, narrow in ((2, 64, 10), (24, 32, 32), (128, 64, 64), (128, 256, 256), (512, 512, 512)):
        yield partial(F.linear, make(rows, wide), make(narrow, wide), make(narrow))
    yield partial(F.linear, make(512, 1024), make(1024, 1024), make(1024))
    yield partial(F.linear, make(2, 2048), make(4096, 2048), make(4096))
    yield partial(torch.bmm, make(16, 64, 32), make(16, 32, 64))
    for batch, heads, length, width in ((2, 4, 12, 8), (2, 4, 64, 32), (2, 8, 256, 64)):
        each = make(batch, heads, length, width)
        yield partial(F.scaled_dot_product_attention, each, each, each)


def _convolutions(dtype: torch.dtype) -> Iterator[Work]:
    make = partial(torch.ones, dtype=dtype)
    whole = (
        (16, 16, 8, 1, 1), (16, 16, 32, 3, 1), (32, 64, 16, 1, 2), (64, 64, 14, 1, 1), (24, 96, 56, 1, 1),
        (3, 32, 112, 3, 2), (64, 128, 28, 3, 1), (256, 64, 56, 1, 1), (512, 512, 7, 3, 1), (256, 256, 28, 3, 1),
    )  # fmt: skip
    for taken, given, side, kernel, stride in whole:
        image, filters = make(2, taken, side, side), make(given, taken, kernel, kernel)
        yield partial(F.conv2d, image, filters, stride=stride, padding=kernel // 2)
    grouped = ((32, 32, 8, 3), (96, 96, 28, 3), (144, 144, 28, 5), (32, 32, 112, 3), (128, 32, 28, 3))
    for channels, groups, side, kernel in grouped:
        image, filters = make(2, channels, side, side), make(channels, channels // groups, kernel, kernel)
        yield partial(F.conv2d, image, filters, padding=kernel // 2, groups=groups)


def _normalizations() -> Iterator[Work]:
    for channels, side in ((16, 8), (96, 28), (64, 56), (256, 56)):
        each, ones = torch.rand(2, channels, side, side), torch.ones(channels)
        yield partial(F.batch_norm, each, ones, ones, ones, ones)
    for rows, width in ((24, 32), (256, 16), (512, 512)):
        yield partial(F.layer_norm, torch.rand(rows, width), (width,), torch.ones(width), torch.ones(width))


def _reductions() -> Iterator[Work]:
    for pool, kernel, stride in ((F.max_pool2d, 2, 2), (F.max_pool2d, 3, 2), (F.avg_pool2d, 2, 2)):
        for channels, side in ((8, 8), (64, 28), (64, 56)):
            yield partial(pool, torch.rand(2, channels, side, side), kernel, stride)
    yield partial(torch.mean, torch.rand(24, 32), -1, keepdim=True)
    yield partial(torch.softmax, torch.rand(96, 12), -1)
    yield partial(torch.softmax, torch.rand(2048, 256), -1)
    for channels, side in ((96, 14), (64, 56)):
        yield partial(torch.mean, torch.rand(2, channels, side, side), (2, 3), keepdim=True)


def _elementwise() -> Iterator[Work]:
    for shape in ((2, 12, 32), (2, 64, 14, 14), (2, 64, 56, 56)):
        each = torch.rand(shape)
        yield partial(torch.add, each, each)
        yield partial(torch.mul, each, each[..., :1])
        yield partial(torch.relu_, each)
        yield partial(torch.cat, [each, each], 1)
        yield each.transpose(1, 2).contiguous
        for function in (torch.sigmoid, F.gelu, torch.tanh):
            yield partial(function, each)
    yield partial(torch.pow, torch.rand(24, 32), 2.0)


def _lookups() -> Iterator[Work]:
    for rows, width, count in ((64, 32, 24), (4096, 64, 64), (4096, 256, 1024)):
        yield partial(F.embedding, torch.arange(count).remainder(rows), torch.rand(rows, width))
    yield partial(torch.arange, 12)
    yield partial(torch.full, (24, 32), 0.5)
    for rows in (24, 2048):
        yield partial(torch.cumsum, torch.rand(rows, 128), 1)
        yield partial(torch.flip, torch.rand(rows, 128), (0,))


def _graph(kind: str) -> GraphModule:
    """Return a chain of nodes of one kind; parameters and layers are nested as deeply as they are in models."""
    root = torch.nn.Module()
    root.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU())) for _ in range(NODES))
    for block in root.blocks:
        block[0][0].register_buffer("kept", torch.ones(8))  # type: ignore[index]
    graph = Graph()
    value = graph.placeholder("x")
    for index in range(NODES):
        path = f"blocks.{index}.0.0"
        if kind == "attribute":
            graph.get_attr(f"{path}.kept")
        if kind == "view":
            value = graph.call_method("view", (value, 8))
        elif kind == "layer":
            value = graph.call_module(path, (value,))
        else:
            relu = torch.ops.aten.relu.default if kind == "overload" else torch.relu
            value = graph.call_function(relu, (value,))
    graph.output(value)
    return GraphModule(root, graph)


_DTYPES = (torch.float32, torch.bfloat16)
_FEWEST_ROUNDS = 3
_FEWEST_CASES = 3
"""Minimum number of cases for an operator to be described on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """One case: its operator, the number of operators it runs in all, and its time in seconds."""

    operation: Operation
    operators: int
    seconds: float


@torch.no_grad()
def calibrate(*, seconds: float = 8.0) -> Device:
    """Return a description of this processor.

    Args:
        seconds: how long to measure; at least three rounds of all cases run in any case.
    """
    calls, moves = graphs(), copies()
    kinds = [run for dtype in _DTYPES for run in cases(dtype)]
    called_s = _least(list(calls.values()), seconds / 10)
    node_s = {kind: each / NODES for kind, each in zip(calls, called_s, strict=True)}
    taken_s = _least([*moves.values(), *kinds], seconds)
    moved_s = dict(zip(moves, taken_s, strict=False))
    samples = [_sample(run, each) for run, each in zip(kinds, taken_s[len(moves) :], strict=True)]
    peaks = tuple(_peaks(samples, node_s["view"]))
    copy_s = next(each.launch_s for each in peaks if each.work == "elementwise") + node_s["view"]
    return Device(
        name=f"{processor()}, {torch.get_num_threads()} threads",
        source=f"measured by fxlib calibrate, torch {torch.__version__}",
        memory_bytes=float(memory_bytes()),
        layer_s=max(node_s["layer"] - node_s["function"], 0.0),
        overload_s=max(node_s["overload"] - node_s["function"], 0.0),
        attribute_s=max(node_s["attribute"] - node_s["function"], 0.0),
        dispatch_s=node_s["view"],
        asynchronous=False,
        memory=tuple(_bandwidths(moved_s, copy_s)),
        peaks=peaks,
    )


def _least(runs: Sequence[Work], seconds: float) -> list[float]:
    """Return the shortest time of each run, over rounds in which they take turns from the shortest to the longest."""
    least_s = [min(_timed(run), _timed(run)) for run in runs]
    order, rounds, end = sorted(range(len(runs)), key=least_s.__getitem__), 0, time.perf_counter() + seconds
    while rounds < _FEWEST_ROUNDS or time.perf_counter() < end:
        for position in order:
            least_s[position] = min(least_s[position], _timed(runs[position]))
        rounds += 1
    return least_s


def _timed(run: Work) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _sample(run: Work, seconds: float) -> _Sample:
    with Operations() as found:
        run()
    operations = found.taken()
    most = max(operations, key=lambda each: (not each.is_view, each.flops, each.elements))
    return _Sample(operation=most, operators=len(operations), seconds=seconds)


def _peaks(samples: Sequence[_Sample], dispatch_s: float) -> Iterator[Peak]:
    """Fit each kind of work, and each operator of the kinds without arithmetic, since these operators differ most."""
    groups: dict[tuple[str, str], list[_Sample]] = {}
    for each in samples:
        dtype = each.operation.dtype if each.operation.dtype in _DTYPES else torch.float32
        name = str(dtype).removeprefix("torch.")
        groups.setdefault((name, each.operation.work), []).append(each)
        if not each.operation.flops:
            groups.setdefault((name, each.operation.operator), []).append(each)
    for (dtype_name, work), of_kind in groups.items():
        if work in WORK or len(of_kind) >= _FEWEST_CASES:
            yield _peak(dtype_name, work, of_kind, dispatch_s)


def _peak(dtype: str, work: str, samples: Sequence[_Sample], dispatch_s: float) -> Peak:
    amounts = [(1, number(each.operation.flops) or 0, number(each.operation.elements) or 0) for each in samples]
    taken_s = [max(each.seconds - each.operators * dispatch_s, dispatch_s / 10) for each in samples]
    launch_s, flop_s, element_s = fit(amounts, taken_s)
    return Peak(dtype=dtype, work=work, flops_per_s=_rate(flop_s), elements_per_s=_rate(element_s), launch_s=launch_s)


def _rate(cost_s: float) -> float:
    return 1 / cost_s if cost_s else float("inf")


def _bandwidths(moved_s: Mapping[int, float], start_s: float) -> list[Bandwidth]:
    return [
        Bandwidth(bytes=float(moved), bytes_per_s=moved / max(taken_s - start_s, start_s / 10))
        for moved, taken_s in moved_s.items()
    ]


def fit(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the cost of one unit of each amount that makes the sums of amounts times costs fit the measured times.

    The fit is the least-squares solution in relative errors with non-negative costs.

    Every set of costs that could be zero is tried, so the number of amounts must be small.

    Args:
        amounts: a row for each measurement, with as many columns as there are costs.
        seconds: the time of each measurement, above zero.

    Source: C. L. Lawson, R. J. Hanson, "Solving Least Squares Problems", 1974, chapter 23, on non-negative solutions.
    """
    taken_s = np.asarray(seconds, dtype=np.float64)
    rows = np.asarray(amounts, dtype=np.float64) / taken_s[:, None]
    count = rows.shape[1]
    best, least = np.zeros(count), float(len(taken_s))
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            costs = np.zeros(count)
            costs[chosen] = np.linalg.lstsq(rows[:, chosen], np.ones(len(taken_s)), rcond=None)[0]
            error = float(np.sum((rows @ costs - 1) ** 2))
            if (costs >= 0).all() and error < least:
                best, least = costs, error
    return tuple(map(float, best))
