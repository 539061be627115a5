"""Let gradients of remote results share one message to each server, instead of being pushed one by one."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.introduced import Introduced
from fxlib.reasons import Declined, Reason
from fxlib.runtime import ops
from fxlib.runtime.ops.registry import Role
from fxlib.runtime.ops.timeline import call_name


@register_pass("send_gradients", preserves="bitwise", introduces=Introduced.with_roles(Role.TRACK), version="2")
class SendGradients(GraphPass):
    """Send the gradients of remote results, if the program pushes them, in one message to each server."""

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        tracked = [node for node in module.graph.nodes if node.target is ops.track_gradient]
        if context.workload is not None and context.workload.mode == "distributed":
            return PassResult(module, changes=0, declined=tuple(map(_decline, tracked)))
        for node in tracked:
            node.target = ops.send_gradient
        return PassResult(module, changes=len(tracked))


def _decline(node: Node) -> Declined:
    return Declined(node=call_name(node.all_input_nodes[0]), reason=Reason.GRADIENT_CARRIED)
