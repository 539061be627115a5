"""Make each read of a server once.

A read is redundant if an earlier one asks for the same, and nothing between them could change the answer; whether one
result may serve for both depends on what becomes of the results.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.local_work import Escapes
from fxlib.analysis.effects.resources import contract_of_call, function_name, speaks_to
from fxlib.analysis.operators.arguments import frozen
from fxlib.analysis.scheduling.reordering import levels, was_split
from fxlib.passes.infra.base import MERGED, Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.introduced import NOTHING
from fxlib.reasons import Declined, Reason
from fxlib.runtime import ops
from fxlib.runtime.ops.calls import is_call
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.runtime.ops.timeline import call_name
from fxlib.runtime.program_modes import grad_mode_after
from fxlib.spec.profile import Opaque, Profile, TensorShape
from fxlib.spec.report import CallReport


@register_pass("merge_reads", preserves="bitwise", introduces=NOTHING, version="4")
class MergeReads(GraphPass):
    """Let a read that repeats an earlier one share its result, if no result is changed, escapes or takes a gradient.

    It must be known that a result takes no gradient: its values are used as integers or without a gradient, no
    gradients are recorded where it is made, or it came without a gradient in a profile.
    """

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        found = list(duplicates(module, context.get(Dependencies), context.profile))
        merged = [each for each in found if each.refusal is None]
        for each in merged:
            merge(each)
        declined = (_declined(each, each.refusal) for each in found if each.refusal is not None)
        calls = tuple(_report(each) for each in merged)
        return PassResult(module, changes=len(merged), declined=tuple(declined), calls=calls)


def merge(duplicate: Duplicate) -> None:
    """Remove the later call; the earlier one stands for it from now on."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """A call that reads what an earlier one has read. `refusal` says why one result may not serve for both.

    Calls that are split are named by their issues.
    """

    call: Node
    earlier: Node
    refusal: Reason | None


def duplicates(module: GraphModule, dependencies: Dependencies, profile: Profile | None) -> Iterator[Duplicate]:
    """Yield the reads of a program that repeat an earlier one, with nothing between that could change the answer.

    Calls in their blocking form count, and calls that were split, but not calls that the program itself issues. Two
    reads are the same if they have the same server, function, arguments and timeout; arguments must be the same values,
    not only equal ones, and not be written in between.
    """
    nodes = dependencies.effects.nodes
    kinds = {position: frozen(node.args) for position, node in enumerate(nodes) if _is_read(node)}
    level, results = levels(dependencies, kinds), _Results(module, dependencies, profile)
    firsts: dict[Hashable, Node] = {}
    for position, kind in kinds.items():
        earlier = firsts.setdefault((kind, level[position]), nodes[position])
        if earlier is not nodes[position]:
            refusal = results.refusal(result_of(nodes[position]), result_of(earlier))
            yield Duplicate(call=nodes[position], earlier=earlier, refusal=refusal)


def result_of(call: Node) -> Node:
    """Return the node whose value is the result of a call from `duplicates`: its wait, if it is split."""
    return next(iter(call.users)) if call.target is ops.issue_call else call


class _Results:
    """The uses of the results of calls."""

    def __init__(self, module: GraphModule, dependencies: Dependencies, profile: Profile | None) -> None:
        effects = dependencies.effects
        self._effects, self._profile = effects, profile
        self._escapes = Escapes(effects)
        self._handed_on = {
            effects.aliases.of(value) for node in effects.nodes if _hands_on(node) for value in node.all_input_nodes
        }
        self._without_grad = _without_grad(module, effects.nodes)

    def refusal(self, result: Node, earlier: Node) -> Reason | None:
        """Return why one result may not serve for two identical calls; None if it may."""
        return self._of_one(result) or self._of_one(earlier) or self._escapes.merge(result, earlier)

    def _of_one(self, result: Node) -> Reason | None:
        """Return why a result may not be shared with another identical call; None if it may."""
        found = self._escapes.refusal(result)
        if found is Reason.VALUE_WRITTEN or self._effects.aliases.of(result) in self._handed_on:
            return Reason.RESULT_CHANGED
        if found is Reason.VALUE_ESCAPES:
            return Reason.RESULT_ESCAPES
        return None if self._takes_no_gradient(result) else Reason.RESULT_TAKES_GRADIENT

    def _takes_no_gradient(self, result: Node) -> bool:
        if any(user.target in TRACKERS for user in result.users):
            return False
        if result in self._without_grad or result.meta.get("requires_grad") is False:
            return True
        known = None if self._profile is None else self._profile.call_by_name.get(call_name(result))
        if known is not None and not _may_require_grad(known.returns):
            return True
        return all(self._stops_gradient(user) for user in result.users)

    def _stops_gradient(self, user: Node) -> bool:
        operator = self._effects.behaviours[self._effects.index[user]].operator
        return operator is not None and not operator.gradient


def _is_read(node: Node) -> bool:
    if node.target is not ops.remote_call and not _is_split(node):
        return False
    contract = contract_of_call(node)
    return contract is not None and contract.is_read


def _is_split(node: Node) -> bool:
    return node.target is ops.issue_call and len(node.users) == 1 and was_split(next(iter(node.users)))


def _hands_on(node: Node) -> bool:
    """Return whether the node calls unknown code, which may keep its arguments in this process."""
    return (is_call(node) or node.target in {ops.issue_call, ops.start_call}) and contract_of_call(node) is None


def _without_grad(module: GraphModule, nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that run while no gradients are recorded."""
    state = getattr(module, "_fxlib", None)
    enabled = state is None or state.conditions.grad_enabled
    found: set[Node] = set()
    for node in nodes:
        enabled = grad_mode_after(node, enabled)
        if not enabled:
            found.add(node)
    return found


def _may_require_grad(returns: object) -> bool:
    """Return whether a tensor of a recorded result took a gradient, as it came with an autograd history of its own."""
    if isinstance(returns, TensorShape):
        return returns.requires_grad
    if isinstance(returns, dict):
        return any(map(_may_require_grad, returns.values()))
    if isinstance(returns, (tuple, list)):
        return any(map(_may_require_grad, returns))
    return not isinstance(returns, Opaque)
