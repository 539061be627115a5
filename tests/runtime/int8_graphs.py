"""Graphs of int8 operators, and whether the program that runs in their place has their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxlib.errors import FxlibError
from fxlib.runtime.quantized_program import QuantizedProgram
from tests.runtime.test_int8 import OPERATORS, PLAIN, figures, integers


def graph_of(*calls: tuple[Callable[..., Any], tuple[Any, ...]]) -> GraphModule:
    """Return a module that calls operators, each on the result of the one before and on tensors of its own."""
    graph, root = Graph(), nn.Module()
    value = graph.placeholder("x")
    for operator, args in calls:
        given: list[Any] = []
        for each in args:
            if isinstance(each, Tensor):
                name = f"held_{len(root._buffers)}"
                root.register_buffer(name, each)
                given.append(graph.get_attr(name))
            else:
                given.append(each)
        value = graph.call_function(operator, (value, *given))
    graph.output(value)
    return GraphModule(root, graph)


@torch.no_grad()
def outcome(module: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return module(x)
    except FxlibError as error:
        return str(error)


@torch.no_grad()
def assert_same(module: GraphModule, *inputs: Tensor) -> None:
    program = QuantizedProgram().of(module)
    assert program is not None
    for x in inputs:
        found, expected = outcome(program, x), outcome(module, x)
        if isinstance(expected, str):
            assert found == expected
        else:
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
            assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


def chain() -> GraphModule:
    """From images through two convolutions, a pooling, a norm and a linear layer."""
    norm = torch.linspace(-1.0, 1.0, 8), torch.linspace(0.0, 1.0, 8)
    layer = integers(8, 8, 3, 3), figures(8, 1), figures(8, 2)
    return graph_of(
        (OPERATORS.quantize.default, (0.05, 100)),
        (OPERATORS.int8_conv2d.default, (0.05, 100, *layer, [1, 1], [1, 1], [1, 1], 1, 9.0, 20, "none")),
        (OPERATORS.int8_max_pool2d.default, ([3, 3], [2, 2], [1, 1], [1, 1], True)),
        (OPERATORS.int8_avg_pool2d.default, ([2, 2], [1, 1])),
        (OPERATORS.int8_norm.default, (9.0, 20, *norm, 8.0, 0)),
        (OPERATORS.int8_conv2d.default, (8.0, 0, *layer, *PLAIN, 900.0, 0, "relu")),
        (torch.flatten, (1,)),
        (OPERATORS.int8_linear.default, (900.0, 0, integers(4, 32), figures(4, 3), None, None, 0, "none")),
    )


def images(batch: int = 3, side: int = 8) -> Tensor:
    return torch.randn(batch, 8, side, side, generator=torch.Generator().manual_seed(batch))


Build = Callable[[Graph, Node], Any]


def built(build: Build, **held: Tensor) -> GraphModule:
    """Return a module of the graph that a function builds of its input, with buffers of these names."""
    graph, root = Graph(), nn.Module()
    for name, each in held.items():
        root.register_buffer(name, each.clone())
    graph.output(build(graph, graph.placeholder("x")))
    return GraphModule(root, graph)


def quantize(graph: Graph, x: Node, scale: Any = 0.05) -> Node:
    return graph.call_function(OPERATORS.quantize.default, (x, scale, 7))


def linear(graph: Graph, x: Node) -> Node:
    layer = graph.get_attr("weight"), graph.get_attr("scales"), None
    return graph.call_function(OPERATORS.int8_linear.default, (x, 0.05, 7, *layer, 0.5, 3, "none"))


def convolve(graph: Graph, x: Node, *window: Any) -> Node:
    layer = graph.get_attr("weight"), graph.get_attr("scales"), None
    return graph.call_function(OPERATORS.int8_conv2d.default, (x, 0.05, 7, *layer, *(window or PLAIN), 0.5, 3, "none"))


LINEAR = {"weight": integers(4, 8), "scales": figures(4, 1)}


CONVOLUTION = {"weight": integers(8, 8, 3, 3), "scales": figures(8, 1)}
