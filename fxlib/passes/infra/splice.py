"""Put a snippet into a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxlib.rules.snippet import Snippet

Spliced: TypeAlias = tuple[list[Node], list[Node]]
_KEPT = ("order", "source", "stack_trace", "nn_module_stack")
"""What a new node takes from the one in whose place it stands: where it is in the model, and nothing of its value."""


def splice(graph: Graph, snippet: Snippet, inputs: Mapping[Node, Any], *, before: Node, like: Node) -> Spliced:
    """Insert a snippet's nodes, and return its outputs, which may be inputs, and the nodes that it made.

    Args:
        graph: of the program.
        snippet: what to insert.
        inputs: nodes of the program, or literals, for its inputs.
        before: the node to insert it before.
        like: a node whose place in the model is theirs.
    """
    copied: dict[Node, Any] = dict(inputs)
    with graph.inserting_before(before):
        for node in snippet.nodes:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), copied.__getitem__)
            copied[node] = made = graph.create_node(node.op, node.target, args, kwargs)
            made.meta.update(place_of(like))
    return [copied[each] for each in snippet.outputs], [copied[each] for each in snippet.nodes]


def place_of(node: Node) -> dict[str, Any]:
    """Return the metadata that says where in the model a node is."""
    return {key: node.meta[key] for key in _KEPT if key in node.meta}
