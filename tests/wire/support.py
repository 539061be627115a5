"""Round trips, and the smallest graphs that hold something."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxlib import wire
from fxlib.runtime import CapturedModule


def round_trip(module: GraphModule, **options: Any) -> Any:
    """Encode with weights, serialize, parse and decode; whatever comes back encodes to the same bytes."""
    encoded = wire.encode(module, weights=True)
    data = wire.serialize(encoded.graph)
    decoded = wire.decode(wire.parse(data), blobs=encoded.blobs, **options)
    again = wire.encode(decoded, weights=True)
    assert wire.serialize(again.graph) == data
    assert again.blobs == encoded.blobs
    return decoded


def over_the_wire(module: GraphModule, *, weights: bool = False, **options: Any) -> CapturedModule:
    """The module as another process has it; with the options of `wire.decode`, bound to what that one has."""
    encoded = wire.encode(module, weights=weights)
    if weights:
        options["blobs"] = encoded.blobs
    return wire.decode(wire.parse(wire.serialize(encoded.graph)), **options)


def graph_of(build: Callable[[Graph, Node], Any], root: nn.Module | None = None) -> GraphModule:
    """A module of one input, whose nodes `build` adds and whose output it returns."""
    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return GraphModule(root or nn.Module(), graph)


def calling(*args: Any, **kwargs: Any) -> GraphModule:
    """A module whose one call has these arguments."""
    return graph_of(lambda graph, x: graph.call_function(torch.add, (x, *args), kwargs))


def call_of(module: GraphModule) -> Node:
    """The one call of such a module."""
    return next(node for node in module.graph.nodes if node.op.startswith("call"))
