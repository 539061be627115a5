"""Copies of modules for passes to work on, which leave the module that was given as it is."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxlib.runtime.failure import program_order
from fxlib.runtime.lowering import BACKEND


def draft_of(module: GraphModule) -> GraphModule:
    """Return a module for passes to work on: a graph and tables of its own, the same parameters, and no code yet."""
    draft: GraphModule = type(module).__new__(type(module))
    type(draft).__name__ = type(module).__name__
    draft.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "meta"):
        draft.__dict__[table] = copy.copy(module.__dict__[table])
    graph = Graph(tracer_cls=module.graph._tracer_cls)
    copied: dict[Node, Node] = {}
    for node in module.graph.nodes:
        # Arguments are set afterwards: `create_node` would walk them in search of symbols, a third of the time.
        copied[node] = made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        made.args = map_arg(node.args, copied.__getitem__)
        if node.kwargs:
            made.kwargs = map_arg(node.kwargs, copied.__getitem__)
        made.meta.update(node.meta)
    graph._codegen = copy.copy(module.graph._codegen)  # a deep copy warns of tree specs, which nobody changes
    _number(list(graph.nodes))
    draft.__dict__["_graph"] = graph
    return draft


def _number(nodes: Sequence[Node]) -> None:
    """Give every node its place in the program as captured, which is this very graph if no node knows its place."""
    known = any("order" in node.meta for node in nodes)
    order = program_order(nodes) if known else {node: place for place, node in enumerate(nodes)}
    for node in nodes:
        node.meta["order"] = order[node]


def differs(before: GraphModule, after: GraphModule) -> bool:
    """Whether two modules would run other code, or on other parameters and buffers."""
    if len(before.graph.nodes) != len(after.graph.nodes) or _state(before) != _state(after):
        return True
    pairs = zip(before.graph.nodes, after.graph.nodes, strict=True)
    return any(_code(one) != _code(other) for one, other in pairs)


def _code(node: Node) -> tuple[object, ...]:
    """Return what a node does, in terms that a copy of it shares."""
    return node.name, node.op, node.target, str(node.args), str(node.kwargs), node.meta.get(BACKEND)


def _state(module: GraphModule) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
