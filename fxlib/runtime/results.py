"""Find what a graph returns."""

from __future__ import annotations

from torch.fx import Graph, Node


def returned(graph: Graph) -> list[Node]:
    """Return the nodes whose values a graph returns, alone or in containers and objects that it makes of them."""
    found: dict[Node, None] = {}
    waiting = [value for node in graph.find_nodes(op="output") for value in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if isinstance(node.target, type):  # a dataclass, a named tuple
            waiting.extend(node.all_input_nodes)
        else:
            found[node] = None
    return list(found)
