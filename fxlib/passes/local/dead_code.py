"""Delete nodes whose values are unused and whose absence has no effect."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.effects.node_kinds import Behaviours
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.introduced import NOTHING


@register_pass("dead_code", preserves="bitwise", introduces=NOTHING, version="4")
class DeadCode(GraphPass):
    """Delete unused local work that writes nothing and draws nothing.

    Calls stay, even those that only read: their errors are results, too. Work that may raise depending on values stays
    as well, such as an assertion or a lookup, and so do methods of what may be an object of the user's own. Shapes and
    dtypes of unused work are assumed to be right.
    """

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        behaviours, deleted = Behaviours(module), 0
        for node in reversed(module.graph.nodes):
            if not node.users and not behaviours.of(node).is_impure and not _reveals(node, behaviours):
                module.graph.erase_node(node)
                deleted += 1
        return PassResult(module, changes=deleted)


def _reveals(node: Node, behaviours: Behaviours) -> bool:
    """Return whether the node alone uses a result that may have been called for more than its value."""
    return any(len(value.users) == 1 and behaviours.may_act(value) for value in node.all_input_nodes)
