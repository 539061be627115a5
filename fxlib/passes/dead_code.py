"""Delete nodes whose values nobody uses and whose absence nobody would notice."""

from __future__ import annotations

from torch.fx import GraphModule
from typing_extensions import override

from fxlib.analysis.effects import Effects
from fxlib.passes.base import GraphPass, PassResult, register_pass


@register_pass("dead_code", preserves="bitwise")
class DeadCode(GraphPass):
    """Delete unused local work that writes nothing and draws nothing.

    Calls stay, even those that only read: their errors are results, too. So does work that may raise for the sake of
    values, as an assertion or a lookup does; shapes and dtypes of unused work are taken to be right.
    """

    @override
    def run(self, module: GraphModule) -> PassResult:
        effects, deleted = Effects.of(module), 0
        for node in reversed(effects.nodes):
            if not node.users and node.op != "placeholder" and not effects[node].impure:
                module.graph.erase_node(node)
                deleted += 1
        return PassResult(module, changes=deleted)
