"""Let writes to one server, and reads between them, travel in one message that runs them in program order."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.scheduling.batching import Capacity
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.remote.coalesce_calls import coalesce
from fxlib.passes.remote.write_sequences import may_write_in_turn, sequences
from fxlib.runtime.ops.batches import IN_ORDER


@register_pass("coalesce_writes", preserves="bitwise")
class CoalesceWrites(GraphPass):
    """Issue consecutive writes to one server together: it stops at the first that fails, as the program would.

    Each keeps a wait, a result and an error of its own. It takes calls that are split.
    """

    max_calls: int = 64
    """Of one message."""
    batch_bytes: int = 1 << 20
    """Of one message, requests and answers together, as far as a profile tells."""

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        nodes = list(module.graph.nodes)
        if sum(map(may_write_in_turn, nodes)) < 2:
            return PassResult(module, changes=0)
        capacity = Capacity(calls=self.max_calls, bytes=self.batch_bytes)
        found = list(sequences(context.get(Dependencies), context.costs(), capacity))
        for places in found:
            gather([nodes[place] for place in places])
        return PassResult(module, changes=sum(map(len, found)))


def gather(issues: Sequence[Node]) -> None:
    """Replace issues by one batch where the last of them stands; their waits come behind it."""
    waits = [next(iter(issue.users)) for issue in issues]
    previous = coalesce(issues, IN_ORDER)
    for wait in waits:
        previous.append(wait)
        previous = wait
