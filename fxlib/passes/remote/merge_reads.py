"""Make each read of a server once."""

from __future__ import annotations

from torch.fx import GraphModule
from typing_extensions import override

from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.duplicates import Duplicate, duplicates, result_of
from fxlib.analysis.effects.resources import function_name, speaks_to
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.invariants import MERGED
from fxlib.reasons import Declined, Reason
from fxlib.runtime.ops.record import call_name
from fxlib.spec.report import CallReport


@register_pass("merge_reads", preserves="bitwise", version="2")
class MergeReads(GraphPass):
    """Let a read that repeats an earlier one share its result, where no result is changed, escapes or takes a gradient.

    That a result takes no gradient must be known: its values are used as integers or without a gradient, no gradients
    are recorded where it is made, or a profile has seen it come without one.
    """

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        found = list(duplicates(module, context.get(Dependencies), context.profile))
        merged = [each for each in found if each.hindrance is None]
        for each in merged:
            merge(each)
        declined = (_declined(each, each.hindrance) for each in found if each.hindrance is not None)
        calls = tuple(_report(each) for each in merged)
        return PassResult(module, changes=len(merged), declined=tuple(declined), calls=calls)


def merge(duplicate: Duplicate) -> None:
    """Take out the later call; the earlier one stands for it from now on."""
    call, earlier = duplicate.call, duplicate.earlier
    stands_for = (*earlier.meta.get(MERGED, ()), call_name(call), *call.meta.get(MERGED, ()))
    for node, kept in {result_of(call): result_of(earlier), call: earlier}.items():
        kept.meta[MERGED] = stands_for
        node.replace_all_uses_with(kept)
        node.graph.erase_node(node)


def _declined(duplicate: Duplicate, reason: Reason) -> Declined:
    return Declined(node=call_name(duplicate.call), reason=reason, detail=call_name(duplicate.earlier))


def _report(duplicate: Duplicate) -> CallReport:
    call = duplicate.call
    return CallReport(
        node=call_name(call),
        function=function_name(call),
        to=speaks_to(call),
        action="merged",
        reason=Reason.MERGED,
        detail=call_name(duplicate.earlier),
        source=str(call.meta.get("source", "")),
    )
