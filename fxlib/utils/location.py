"""Where in the user's model a node stands, in words for an error."""

from __future__ import annotations

from torch.fx import Node


def location_of(node: Node) -> str:
    """Return a node's name, the path of its module, and the line of the model, as far as they are known."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if isinstance(entry, tuple)]
    within = f" in {paths[-1]!r}" if paths and paths[-1] else ""
    source = node.meta.get("source", "")
    return f"node {node.name!r}{within}{f' ({source})' if source else ''}"
