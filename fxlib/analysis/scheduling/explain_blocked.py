"""Why a call could not move: the constraint that binds it, and the declaration that would free it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fxlib.analysis.effects.dependencies import Cause, Dependencies
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import (
    ServerState,
    contract_of_call,
    destination,
    function_name,
    methods_sent,
    names_a_function,
    takes_contract,
)
from fxlib.analysis.scheduling.reordering import Pair, Reordering
from fxlib.reasons import Declined, Reason
from fxlib.runtime.ops.timeline import call_name

_ANCHORS = frozenset({Part.WAIT, Part.FENCE, Part.CALL})
_PLAIN = {
    Cause.GRADIENT: Reason.GRADIENT_ORDER,
    Cause.RANDOM: Reason.RANDOM_ORDER,
    Cause.MEMORY: Reason.ARGUMENT_WRITTEN,
    Cause.COMMIT: Reason.ORDERED_BEFORE_WRITE,
}


@dataclass(frozen=True, slots=True, order=True)
class _Bound:
    """The latest position of a node that something depends on and cannot pull along."""

    position: int
    why: Cause


class BlockedCalls:
    """Explains, for one program, the calls that gained nothing."""

    def __init__(self, dependencies: Dependencies, reordering: Reordering) -> None:
        """Find what binds each node from above and each wait from below, in linear time."""
        self._effects = dependencies.effects
        self._above: list[_Bound] = []
        self._below: dict[int, tuple[int, Cause, int]] = {}
        for position, does in enumerate(self._effects.per_node):
            bound = _Bound(-1, Cause.DATA)
            for source, why in dependencies.before(position):
                held = self._effects.per_node[source]
                anchor = why is not Cause.DATA or held.part in _ANCHORS or held.commits
                bound = max(bound, _Bound(source, why) if anchor else self._above[source])
                if held.part is Part.WAIT and does.part is not Part.OUTPUT:
                    follower = (reordering.new_position[position], why, position)
                    self._below[source] = min(follower, self._below.get(source, follower))
            self._above.append(bound)

    def of(self, pair: Pair) -> Declined:
        """Return why the call stays as it is."""
        issue = self._effects.nodes[pair.issue]
        does = self._effects.per_node[pair.issue]
        if does.fence is not None:
            return _declined(issue, Reason.ALREADY_ASYNC)
        if does.part is Part.ISSUE and pair.issue == pair.wait:
            return _declined(issue, Reason.NO_ASYNC_FORM)
        if does.commits and contract_of_call(issue) is None:
            return _declined(issue, Reason.UNKNOWN_CONTRACT, remedy=remedy_for(issue))
        if does.commits:
            written = sorted(each.name or "*" for each in does.writes if isinstance(each, ServerState))
            return _declined(issue, Reason.WRITES_STATE, detail=", ".join(written))
        return self._from_above(pair.issue) or self._from_below(pair) or _declined(issue, Reason.NOTHING_TO_OVERLAP)

    def _from_above(self, position: int) -> Declined | None:
        bound, node = self._above[position], self._effects.nodes[position]
        if bound.position < 0 or bound.why in {Cause.DATA, Cause.MEMORY}:
            return None
        holder = self._effects.nodes[bound.position]
        if bound.why is Cause.FENCE:
            fence = self._effects.per_node[bound.position].fence or Reason.OPAQUE_NEIGHBOUR
            return _declined(node, fence, detail=str(holder))
        if self._effects.per_node[position].joins and bound.why in {Cause.COMMIT, Cause.SERVER}:
            return _declined(node, Reason.COLLECTIVE_ORDER, detail=str(holder))
        if bound.why is not Cause.SERVER:
            return _declined(node, _PLAIN[bound.why], detail=str(holder))
        writer = holder.all_input_nodes[0] if self._effects.per_node[bound.position].part is Part.WAIT else holder
        if contract_of_call(writer) is not None and None in {destination(node), destination(writer)}:
            return _declined(node, Reason.UNKNOWN_DESTINATION)
        return _declined(node, Reason.ORDERED_AFTER_WRITE, remedy=_remedy_if_unknown(writer))

    def _from_below(self, pair: Pair) -> Declined | None:
        node = self._effects.nodes[pair.issue]
        found = self._below.get(pair.wait)
        if found is None or found[1] in {Cause.DATA, Cause.SERVER}:
            return None
        follower, does = self._effects.nodes[found[2]], self._effects.per_node[found[2]]
        if found[1] is Cause.FENCE:
            return _declined(node, does.fence or Reason.OPAQUE_NEIGHBOUR, detail=str(follower))
        if does.joins and not does.commits:
            return _declined(node, Reason.COLLECTIVE_ORDER, detail=str(follower))
        return _declined(node, _PLAIN[found[1]], detail=str(follower), remedy=_remedy_if_unknown(follower))


def remedy_for(call: Node) -> str:
    """Return the declaration that would free a call without a contract, ready to be pasted."""
    name, sent = function_name(call), methods_sent(call)
    if sent:
        return f'declare @fxlib.remote(reads="...") on {sent[0]}, or for all methods at once on {name}'
    if takes_contract(call) and not names_a_function(call):
        return f'pass contract=fxlib.Contract(reads="...") to fxlib.register_call, or contracts={{"{name}": ...}}'
    if not names_a_function(call):
        return f"give the call a contract: node.meta['contract'], on {name}"
    if name.startswith("."):
        return f'declare @fxlib.remote(reads="...") on the method {name[1:]}, or pass contracts={{"{name}": ...}}'
    return f'declare @fxlib.remote(reads="...") on {name}, or pass contracts={{"{name}": ...}}'


def _remedy_if_unknown(call: Node) -> str:
    return remedy_for(call) if takes_contract(call) and contract_of_call(call) is None else ""


def _declined(node: Node, reason: Reason, detail: str = "", remedy: str = "") -> Declined:
    return Declined(node=call_name(node), reason=reason, detail=detail, remedy=remedy)
