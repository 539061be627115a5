"""Edits that several passes make: put values in the place of others, and a snippet into a program.

The time is proportional to the edges of a graph, however many inputs a node has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxlib.rules.snippet import Snippet

_WIDE = 32
"""Nodes with more inputs are given their new ones together: each of them alone would cost all of them."""


class Replacements:
    """Replacements in one graph. All users are told at once, but inputs of wide nodes stand until `settle`."""

    def __init__(self, graph: Graph) -> None:
        """Replace nothing yet."""
        self._graph = graph
        self._wide: dict[Node, bool] = {}
        self._waiting: dict[Node, dict[Node, Node]] = {}
        """Replacements of the inputs of wide nodes."""
        self._erased: list[Node] = []

    def replace(self, old: Node, new: Node) -> None:
        """Let what uses a value use another one."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: not self._is_wide(user))
        for user in old.users:
            self._waiting.setdefault(user, {})[old] = new
            new.users.setdefault(user)

    def erase(self, node: Node) -> None:
        """Erase a node whose users all have another value in its place."""
        if node in self._waiting:
            self._settle(node)
        if node.users:
            node.args, node.kwargs = (), {}
            self._erased.append(node)
        else:
            self._graph.erase_node(node)

    def settle(self) -> None:
        """Give wide nodes their inputs."""
        for node in list(self._waiting):
            self._settle(node)
        for node in self._erased:
            self._graph.erase_node(node)
        self._erased.clear()

    def _settle(self, node: Node) -> None:
        became = self._waiting.pop(node)

        def current(value: Node) -> Any:
            while value in became:
                value = became[value]
            return value

        node.args, node.kwargs = map_arg((node.args, dict(node.kwargs)), current)
        inputs = set(node.all_input_nodes)
        for value in became.values():
            if value not in inputs:
                value.users.pop(node, None)

    def _is_wide(self, node: Node) -> bool:
        if node not in self._wide:
            self._wide[node] = len(node.all_input_nodes) > _WIDE
        return self._wide[node]


Spliced: TypeAlias = tuple[list[Node], list[Node]]
_KEPT = ("order", "source", "stack_trace", "nn_module_stack")
"""Facts that a new node takes from the one in whose place it stands: its place in the model, none of its value."""


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
