"""Values that a pass computed from weights: stored beside the weights, which stay unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from fxlib.analysis.layers import FUNCTIONS, LinearLayer, functional
from fxlib.passes.infra.introduced import Introduced
from fxlib.runtime.guards.folded_weights import FOLDED
from fxlib.runtime.submodules import submodule

CHANNELS_LAST = "channels_last"
"""Key of a node's `meta`, true if a pass has put its value into this layout and knows where it must leave it."""

LAYERS_AS_FUNCTIONS = Introduced.of(*FUNCTIONS, F.pad)
"""The functions that `as_function` puts in."""

FunctionCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A function with its positional and keyword arguments."""


def hold(module: GraphModule, name: str, value: torch.Tensor) -> str:
    """Add a buffer to the root of a module that `state_dict` leaves out, and return its name.

    Args:
        module: the module that a pass works on. Its submodules are the user's own, and stay unchanged.
        name: what the buffer is, as a path of the module; the name is varied if it is taken.
        value: a tensor of its own.
    """
    base = f"_{name.replace('.', '_')}"
    free, count = base, 0
    while _is_taken(module, free):
        count += 1
        free = f"{base}_{count}"
    module._buffers[free] = value
    module._non_persistent_buffers_set.add(free)
    return free


def _is_taken(module: GraphModule, name: str) -> bool:
    tables = (module._buffers, module._parameters, module._modules, vars(module))
    return any([name in each for each in tables]) or hasattr(type(module), name)  # noqa: C419 - a list is faster


def read(module: GraphModule, name: str, sources: Iterable[str], at: Node) -> Node:
    """Insert a `get_attr` of such a value before a node whose position in the program it takes.

    Args:
        module: the module that a pass works on.
        name: the name of the buffer.
        sources: the weights that it was computed from.
        at: the node.
    """
    with module.graph.inserting_before(at):
        node = module.graph.create_node("get_attr", name, name=name)
    node.meta.update(order_and_source(at), requires_grad=False)
    if weights := tuple(sorted(sources)):
        node.meta[FOLDED] = weights
    return node


def as_function(module: GraphModule, layer: LinearLayer, weight: Node, bias: Node | None) -> FunctionCall:
    """Return the function that a module's call stands for with other weights, and its arguments, padded if need be."""
    node, graph = layer.node, module.graph
    called, (function, rest) = submodule(module, str(node.target)), functional(layer, module)
    value = node.all_input_nodes[0]
    if isinstance(called, _ConvNd) and called.padding_mode != "zeros":
        with graph.inserting_before(node):
            value = graph.call_function(F.pad, (value, called._reversed_padding_repeated_twice, called.padding_mode))
        value.meta.update(order_and_source(node))
    return function, (value, weight, bias, *rest), {}


def become(node: Node, call: FunctionCall) -> None:
    """Let a node call a function. Its name stays, and stands for the same value as before."""
    target, args, kwargs = call
    node.op, node.target, node.args = "call_function", target, args
    if node.kwargs or kwargs:  # setting each attribute takes the graph's table of nodes some time
        node.kwargs = kwargs


def sweep(module: GraphModule) -> None:
    """Remove stored values that have been replaced by others."""
    reads = {node: str(node.target) for node in module.graph.nodes if node.op == "get_attr" and FOLDED in node.meta}
    unused = [node for node in reads if not node.users]
    for node in unused:
        module.graph.erase_node(node)
    for name in {reads[node] for node in unused} - {name for node, name in reads.items() if node.users}:
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)


def order_and_source(node: Node) -> dict[str, Any]:
    """Return the order and source of a node, for a node that replaces its value or work."""
    return {key: node.meta[key] for key in ("order", "source") if key in node.meta}
