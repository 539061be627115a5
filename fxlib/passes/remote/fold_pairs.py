"""Turn pairs with nothing between their halves back into blocking calls."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.scheduling.reordering import is_idle, was_split
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.runtime.ops.calls import is_wait, kind_of


@register_pass("fold_pairs", preserves="bitwise")
class FoldPairs(GraphPass):
    """Fold a call that was split for nothing. Calls that the program itself issues and waits for stay as they are.

    So do calls of a batch, which are faster together even when all are waited for at once.
    """

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        waits = [node for node in module.graph.nodes if is_wait(node) and was_split(node) and _is_adjacent(node)]
        for wait in waits:
            fold(wait)
        return PassResult(module, changes=len(waits))


def fold(wait: Node) -> None:
    """Turn the wait into the blocking call, in the place of the wait, and delete the issue."""
    kind, issue = kind_of(wait), wait.all_input_nodes[0]
    assert kind is not None and kind.blocking is not None, wait  # noqa: PT018, S101 - callers ask first
    wait.target, wait.args, wait.kwargs = kind.blocking, issue.args, issue.kwargs
    issue.graph.erase_node(issue)


def _is_adjacent(wait: Node) -> bool:
    node = wait.prev
    while is_idle(node):
        node = node.prev
    return node is wait.args[0]
