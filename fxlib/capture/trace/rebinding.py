"""In-place operators on what may be a number.

For `offset += 1` torch.fx generates `offset += 1; iadd = offset`. If the value is a tensor, that is what the program
does. If it is a number, the generated variable is bound anew, and whoever reads the old value later gets the new one.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from fxlib.capture.trace.values import IN_PLACE


def protect_old_values(graph: Graph) -> None:
    """Let in-place operators work under a second name, where the first is read again and may be that of a number."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target not in IN_PLACE or not isinstance(node.args[0], Node):
            continue
        old = node.args[0]
        if not _is_tensor(old) and any(place[user] > place[node] for user in old.users):
            with graph.inserting_before(node):
                second = graph.call_function(operator.getitem, ((old,), 0))
            second.meta.update({key: node.meta[key] for key in ("source", "stack_trace") if key in node.meta})
            place[second] = place[node]
            node.update_arg(0, second)


def _is_tensor(node: Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    return node.op in ("get_attr", "call_module") or (node.op == "call_function" and module.startswith("torch."))
