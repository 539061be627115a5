"""Send calls to one server in one message."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.resources import contract_of_call
from fxlib.analysis.scheduling.batching import Capacity, may_travel, plan
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import arrange
from fxlib.passes.infra.introduced import Introduced
from fxlib.runtime.ops import issue_batch, wait_item
from fxlib.runtime.ops.registry import Role
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.contract import Contract, union


@register_pass(
    "coalesce_calls", preserves="bitwise", introduces=Introduced.with_roles(Role.ISSUE, Role.WAIT), version="4"
)
class CoalesceCalls(GraphPass):
    """Issue reads of one server together, if none waits for another and none is delayed for the others' sake.

    Each read keeps a wait, a result and an error of its own. On the server they run in parallel, or as the batched form
    that their function declares. The pass works on calls that are split, and leaves methods of RRefs alone.
    """

    max_calls: int = 64
    """Maximum number of calls in one message."""
    batch_bytes: int = 1 << 20
    """Maximum bytes of one message, requests and answers together, by the profile; a larger call goes alone."""
    declared: bool = True
    """Whether declared batched forms may be used, unless a profile says that they would occupy the server longer."""

    def __post_init__(self) -> None:
        """Reject limits that nothing could meet."""
        self.require_at_least(max_calls=1, batch_bytes=0)

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        nodes, capacity = list(module.graph.nodes), Capacity(calls=self.max_calls, bytes=self.batch_bytes)
        if sum(map(may_travel, nodes)) < 2:
            return PassResult(module, changes=0)
        found = plan(
            context.get(Dependencies),
            context.costs(),
            capacity,
            declared=self.declared,
            in_turn=context.workload is not None and context.workload.mode == "distributed",
        )
        if not found.groups:
            return PassResult(module, changes=0, declined=found.declined)
        arrange([nodes[position] for position in found.order])
        for group, batched_by in zip(found.groups, found.batched_by, strict=True):
            coalesce([nodes[position] for position in group], batched_by)
        heads = {position: group[-1] for group in found.groups for position in group}
        context.keep(found.dependencies.gathered(found.order, heads, list(module.graph.nodes)))
        return PassResult(module, changes=sum(map(len, found.groups)), declined=found.declined)


def coalesce(issues: Sequence[Node], batched_by: str | None) -> Node:
    """Replace adjacent issues, each with exactly one wait, by one batch; return its node."""
    first, last, waits = issues[0], issues[-1], [next(iter(issue.users)) for issue in issues]
    calls = tuple((issue.args[1], issue.args[2], issue.args[3]) for issue in issues)
    with first.graph.inserting_after(last):
        arguments = (first.args[0], calls, first.args[4], batched_by)
        name = f"{call_name(first)}_batch"
        batch = first.graph.create_node("call_function", issue_batch, arguments, name=name)
    batch.meta = {key: first.meta[key] for key in ("source", "stack_trace", "nn_module_stack") if key in first.meta}
    batch.meta["contract"] = union(_contracts(issues))
    # The program has the arguments of all calls only once it reaches the last call.
    orders = [order for issue in issues if isinstance(order := issue.meta.get("order"), int)]
    if len(orders) == len(issues):
        batch.meta["order"] = max(orders)
    for index, (issue, wait) in enumerate(zip(issues, waits, strict=True)):
        wait.meta["call"], wait.meta["contract"] = call_name(issue), issue.meta["contract"]
        wait.target, wait.args, wait.kwargs = wait_item, (batch, index), {}
        issue.graph.erase_node(issue)
    return batch


def _contracts(issues: Sequence[Node]) -> list[Contract]:
    return [contract for issue in issues if (contract := contract_of_call(issue)) is not None]
