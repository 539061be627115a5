"""Let gradients of remote results leave from inside backward, instead of one by one after it."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.passes.base import GraphPass, PassResult, register_pass
from fxlib.reasons import Declined, Reason
from fxlib.runtime import ops
from fxlib.runtime.record import call_name
from fxlib.workload import WORKLOAD, Workload

_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})


@register_pass("send_gradients", preserves="bitwise")
class SendGradients(GraphPass):
    """Send the gradient of each remote result as soon as those of its server are there; a push then waits for them.

    Under a workload whose step needs all gradients before the first is pushed, nothing is sent early. Without a
    workload, what the program does shows it at run time.
    """

    @override
    def run(self, module: GraphModule) -> PassResult:
        tracked = [node for node in module.graph.nodes if node.target is ops.track_gradient]
        reason, detail = _forbidden_by(module.meta.get(WORKLOAD))
        if reason is not None:
            return PassResult(module, changes=0, declined=tuple(_decline(node, reason, detail) for node in tracked))
        hooked = _hooked(module)
        declined: list[Declined] = []
        for node in tracked:
            if node in hooked:
                declined.append(_decline(node, Reason.GRADIENT_HOOKED, hooked[node].name))
            elif other := _other_user(node):
                declined.append(_decline(node, Reason.RESULT_SHARED, other.name))
            else:
                node.target = ops.send_gradient
        return PassResult(module, changes=len(tracked) - len(declined), declined=tuple(declined))


def _forbidden_by(workload: Workload | None) -> tuple[Reason | None, str]:
    """Return what of a workload's step forbids to send a gradient before the program pushes."""
    if workload is None:
        return None, ""
    if workload.mode == "distributed":
        return Reason.GRADIENT_CARRIED, ""
    if workload.accumulation > 1:
        return Reason.GRADIENT_ACCUMULATED, f"accumulation={workload.accumulation}"
    if workload.clip_norm is not None:
        return Reason.GRADIENT_CLIPPED, f"clip_norm={workload.clip_norm:g}"
    if workload.loss_scale is not None:
        return Reason.GRADIENT_SCALED, f"loss_scale={workload.loss_scale:g}"
    return None, ""


def _hooked(module: GraphModule) -> dict[Node, Node]:
    """Return the tracked results on which, or on what is made of which, the graph sets a hook, and the hook.

    What a node is made of is its first argument.
    """
    found: dict[Node, Node] = {}
    tracked_behind: dict[Node, Node] = {}
    for node in module.graph.nodes:
        first = node.args[0] if node.args else None
        source = node if node.target in ops.TRACKERS else tracked_behind.get(first) if isinstance(first, Node) else None
        if source is not None:
            tracked_behind[node] = source
            if node.op == "call_method" and node.target in _HOOKS:
                found[source] = node
    return found


def _other_user(tracker: Node) -> Node | None:
    """Return a node that uses the tracked result as it came; None if there is none.

    The two share memory, and autograd counts the writes to it through either. What a fan makes has a count of its own.
    """
    return next((user for user in tracker.all_input_nodes[0].users if user is not tracker), None)


def _decline(node: Node, reason: Reason, detail: str) -> Declined:
    call = node.all_input_nodes[0]
    return Declined(node=call_name(call), reason=reason, detail=detail)
