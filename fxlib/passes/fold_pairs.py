"""Turn pairs with nothing between their halves back into blocking calls."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.calls import is_idle
from fxlib.passes.base import GraphPass, PassResult, register_pass
from fxlib.runtime.calls import is_issue, is_wait, kind_of


@register_pass("fold_pairs", preserves="bitwise")
class FoldPairs(GraphPass):
    """Fold a call that was split for nothing. Calls that the program itself issues and waits for stay as they are."""

    @override
    def run(self, module: GraphModule) -> PassResult:
        waits = [node for node in module.graph.nodes if is_wait(node) and _was_split(node) and _is_adjacent(node)]
        for wait in waits:
            fold(wait)
        return PassResult(module, changes=len(waits))


def fold(wait: Node) -> None:
    """Turn the wait into the blocking call, in the place of the wait, and delete the issue."""
    kind, issue = kind_of(wait), wait.all_input_nodes[0]
    assert kind is not None, wait  # noqa: S101 - callers ask is_wait first
    wait.target, wait.args, wait.kwargs = kind.blocking, issue.args, issue.kwargs
    issue.graph.erase_node(issue)


def _was_split(wait: Node) -> bool:
    """Whether both halves were one node in the program as captured."""
    issue = wait.args[0]
    if not isinstance(issue, Node) or not is_issue(issue) or len(issue.users) != 1:
        return False
    order = wait.meta.get("order")
    return order is not None and order == issue.meta.get("order") and wait.meta.get("call") == issue.meta.get("call")


def _is_adjacent(wait: Node) -> bool:
    node = wait.prev
    while is_idle(node):
        node = node.prev
    return node is wait.args[0]
