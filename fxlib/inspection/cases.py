"""What `calibrate` runs: for each kind of work, cases from tiny to large, of shapes that are common in models.

Sizes of one kind differ in arithmetic, in elements and in the ratio of the two, so that each of their costs shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

Work = Callable[[], object]

NODES = 32
"""Nodes of each graph of `graphs`."""


def cases(dtype: torch.dtype) -> Iterator[Work]:
    """Yield the cases of one dtype: of all kinds in float32, in others of those that do arithmetic."""
    yield from _products(dtype)
    yield from _convolutions(dtype)
    if dtype is torch.float32:
        yield from _normalizations()
        yield from _reductions()
        yield from _elementwise()
        yield from _lookups()


def graphs() -> dict[str, Work]:
    """Return graphs of equally many nodes that differ in what a node is: the differences are what a call takes."""
    return {
        kind: partial(_graph(kind), torch.ones(8)) for kind in ("view", "function", "layer", "overload", "attribute")
    }


def copies() -> dict[int, Work]:
    """Return copies into fresh memory, by the bytes that each reads and writes."""
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
    """Return a chain of nodes of one kind; parameters and layers lie as deep as they do in models."""
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
