"""Split each blocking call into adjacent issue and wait, and fold pairs that are still adjacent."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.scheduling.reordering import is_idle, was_split
from fxlib.passes.infra.base import MERGED, Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.introduced import Introduced
from fxlib.runtime.ops.calls import is_call, is_wait, kind_of
from fxlib.runtime.ops.registry import Role

KEPT_BY_ISSUE = ("call", "contract", "order", "source", "stack_trace", "nn_module_stack", MERGED)
"""Metadata that belongs to the call; the rest describes its result, and stays with the wait."""


@register_pass("split_calls", preserves="bitwise", introduces=Introduced.with_roles(Role.ISSUE, Role.WAIT))
class SplitCalls(GraphPass):
    """Split every blocking call into halves that other passes can separate. The wait keeps the call's node and name."""

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        calls = [node for node in module.graph.nodes if is_call(node)]
        for call in calls:
            split(call)
        return PassResult(module, changes=len(calls))


def split(call: Node) -> Node:
    """Turn a blocking call into the wait for an issue in front of it; return the issue."""
    kind, graph = kind_of(call), call.graph
    assert kind is not None, call  # noqa: S101 - callers ask is_call first
    call.meta.setdefault("call", call.name)
    with graph.inserting_before(call):
        issue = graph.create_node("call_function", kind.issue, call.args, call.kwargs, name=f"{call.name}_issue")
    issue.meta = {key: call.meta[key] for key in KEPT_BY_ISSUE if key in call.meta}
    call.target, call.args, call.kwargs = kind.wait, (issue,), {}
    return issue


@register_pass("fold_pairs", preserves="bitwise", introduces=Introduced.with_roles(Role.CALL))
class FoldPairs(GraphPass):
    """Fold calls that were split in vain. Calls that the program itself issues and waits for are left alone.

    Calls of a batch are left alone, too: they are faster together even if all are waited for at once.
    """

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        waits = [node for node in module.graph.nodes if is_wait(node) and was_split(node) and _is_adjacent(node)]
        for wait in waits:
            _fold(wait)
        return PassResult(module, changes=len(waits))


def _fold(wait: Node) -> None:
    """Turn the wait into the blocking call, at the wait's position, and delete the issue."""
    kind, issue = kind_of(wait), wait.all_input_nodes[0]
    assert kind is not None and kind.blocking is not None, wait  # noqa: PT018, S101 - callers ask first
    wait.target, wait.args, wait.kwargs = kind.blocking, issue.args, issue.kwargs
    issue.graph.erase_node(issue)


def _is_adjacent(wait: Node) -> bool:
    node = wait.prev
    while is_idle(node):
        node = node.prev
    return node is wait.args[0]
