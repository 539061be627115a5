"""What the torch.fx paper does to remote calls, and no more: split each, issue it early, wait for it late.

Source: J. Reed et al., "torch.fx: practical program capture and transformation for deep learning in Python", MLSys
2022, section 6.2.3. Each issue stands as early as its data allows, and each wait right before the first use of its
result. Nothing else changes its place, and gradients are sent as the program sends them. The paper leaves what may
cross a write to its user: in these programs there is none.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.remote.split_calls import split
from fxlib.recipes.recipes import Recipe
from fxlib.runtime import is_call, ops


@register_pass("split_and_hoist", preserves="bitwise")
class SplitAndHoist(GraphPass):
    """Split and hoist, as in the paper."""

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        calls = [node for node in module.graph.nodes if is_call(node)]
        for call in calls:
            issue = split(call)
            max(issue.all_input_nodes, default=issue.prev).append(issue)
        for call in calls:
            _sink(call)
        return PassResult(module, changes=len(calls))


def _sink(wait: Node) -> None:
    """Put a wait right before its first use. What notes where its gradient goes moves along."""
    first = min(wait.users)
    if first.target is ops.track_gradient:
        _sink(first)
    first.prepend(wait)


RECIPE = Recipe(name="paper", summary="Split and hoist.", passes=(SplitAndHoist(),))
