"""Compute each value once."""

from __future__ import annotations

from collections.abc import Hashable

from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.effects.gradients import GradientUses, may_record_gradients
from fxlib.analysis.effects.local_work import Escapes
from fxlib.analysis.effects.model import Effects, NodeEffects
from fxlib.analysis.effects.node_kinds import Behaviours, Part
from fxlib.analysis.effects.resources import Resource
from fxlib.analysis.operators.arguments import frozen
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.introduced import NOTHING
from fxlib.reasons import Declined, Reason


@register_pass("common_subexpressions", preserves="bitwise", introduces=NOTHING, version="4")
class CommonSubexpressions(GraphPass):
    """Let local work that repeats earlier work on the same values share its result.

    Nothing between the two may affect either: no write to what they read, no code that may do anything, no change of
    mode. Their result is neither written to nor returned, so one tensor cannot be distinguished from two. It also takes
    no gradient: two uses of one result sum their gradients before the work's backward, whereas the gradients of two
    results are summed after it, with other rounding. Without recording, no gradients are taken. Reads of servers are
    left to `merge_reads`.
    """

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        effects = context.get(Effects)
        state, sharing = _State(), _Sharing(module, effects)
        behaviours = Behaviours(module)
        firsts: dict[Hashable, Node] = {}
        changes, declined = 0, list[Declined]()
        for node, does in zip(effects.nodes, effects.per_node, strict=True):
            seen = state.seen_by(does)
            state.advance(does)
            if not _repeats_alike(effects, node, does) or behaviours.may_act(node) or behaviours.may_change(node):
                continue
            earlier = firsts.setdefault((node.op, node.target, frozen(node.args), frozen(node.kwargs), seen), node)
            if earlier is node:
                continue
            reason = sharing.refusal(node, earlier)
            if reason is not None:
                declined.append(Declined(node=node.name, reason=reason, detail=earlier.name))
                continue
            node.replace_all_uses_with(earlier)
            module.graph.erase_node(node)
            changes += 1
        return PassResult(module, changes=changes, declined=tuple(declined))


class _State:
    """The latest write of each memory, and the latest fence, at one point of the program."""

    def __init__(self) -> None:
        self._position = -1
        self._fence = -1
        self._writes: dict[Resource, int] = {}

    def seen_by(self, does: NodeEffects) -> Hashable:
        """Return a key that distinguishes the states of the world that a node may see."""
        return self._fence, frozenset((each, self._writes.get(each, -1)) for each in does.reads)

    def advance(self, does: NodeEffects) -> None:
        """Advance past a node."""
        self._position += 1
        if does.part is Part.FENCE:
            self._fence = self._position
        for each in does.writes:
            self._writes[each] = self._position


class _Sharing:
    """Decides whether the result of a node may replace another one's."""

    def __init__(self, module: GraphModule, effects: Effects) -> None:
        self._escapes = Escapes(effects)
        self._gradients = GradientUses(module, effects) if may_record_gradients(module) else None

    def refusal(self, node: Node, earlier: Node) -> Reason | None:
        if node.op == "get_attr":
            return None  # the same object each time
        if (reason := self._escapes.refusal(node) or self._escapes.refusal(earlier)) is not None:
            return reason
        takes = self._gradients is not None and any(map(self._gradients.takes_gradient, (node, earlier)))
        return Reason.TAKES_GRADIENT if takes else self._escapes.merge(node, earlier)


def _repeats_alike(effects: Effects, node: Node, does: NodeEffects) -> bool:
    """Return whether the node does the same each time without side effects: torch's own work, or an attribute."""
    if does.part is Part.STATE:
        return True
    operator = effects.behaviours[effects.index[node]].operator
    return does.part is Part.LOCAL and operator is not None and not does.writes and not operator.random
