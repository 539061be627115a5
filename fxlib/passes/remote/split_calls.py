"""Split each blocking call into its issue and its wait, next to each other."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.invariants import MERGED
from fxlib.runtime.ops.calls import is_call, kind_of

KEPT_BY_ISSUE = ("call", "contract", "order", "source", "stack_trace", "nn_module_stack", MERGED)
"""Metadata that is true of the call; the rest speaks of its result, and stays with the wait."""


@register_pass("split_calls", preserves="bitwise")
class SplitCalls(GraphPass):
    """Give every blocking call two halves that other passes can move apart. The wait keeps the call's node and name."""

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
