"""Whether the replacement of a rule may take the place of a match: asked of the effects model, which knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.motion import Motion
from fxlib.analysis.effects.records_gradients import records_gradients
from fxlib.analysis.effects.sharing import Sharing
from fxlib.analysis.operators.access import nodes_in
from fxlib.analysis.operators.canonical import form_of
from fxlib.reasons import Declined, Reason
from fxlib.rules.guards import Match
from fxlib.rules.rule import Rule


class Legality:
    """Knows a program as it was, and what rules have put into it since."""

    def __init__(self, module: GraphModule, *, bitwise: bool) -> None:
        """Analyse a program; with `bitwise`, gradients are to be added up in the order in which they were."""
        effects, self._records = Effects.of(module), records_gradients(module)
        self._motion = Motion(module, effects, keep_gradients=bitwise and self._records)
        self._sharing = Sharing(effects)
        self._places = dict(effects.index)

    def hindrance(self, match: Match, rule: Rule) -> Declined | None:
        """Return why a rule may not be applied to a match; None if it may."""
        found = self._torn(match) or self._misplaced(match, rule) or self._told(match, rule)
        guard = rule.agrees()
        if found is not None or guard is None:
            return found
        return None if guard(match) else _declined(match, Reason.GUARD, rule.name)

    def _torn(self, match: Match) -> Declined | None:
        """Return why the match cannot be taken out of the program."""
        nodes = set(match.nodes)
        for node in match.nodes:
            outside = next((user for user in node.users if user not in nodes), None)
            if outside is not None and node not in match.outputs:
                return _declined(match, Reason.USED_OUTSIDE, f"{node.name}, by {outside.name}")
            if (reason := self._motion.unfit(node)) is not None:
                return _declined(match, reason, node.name)
        within = next((each for each in match.values if each in nodes), None)
        return (
            None if within is None else _declined(match, Reason.USED_OUTSIDE, f"{within.name}, which goes into it, too")
        )

    def _misplaced(self, match: Match, rule: Rule) -> Declined | None:
        """Return why its work cannot all be done at one place."""
        before = insertion(match)
        if late := next((each for each in match.values if not each < before), None):
            return _declined(match, Reason.USED_BEFORE, f"{before.name} uses a result before {late.name} is there")
        at = self._places[before]
        reason = self._motion.hindrance(match.nodes, at)
        if reason is None and self._records and rule.gives.saves:
            values = map(self._sharing.original, (*match.values, *match.outputs))
            reason = Reason.MAY_BE_SAVED if any(self._motion.written_from(each, at) for each in values) else None
        return None if reason is None else _declined(match, reason)

    def _told(self, match: Match, rule: Rule) -> Declined | None:
        """Return by what somebody could tell the replacement from the match."""
        did, will = rule.seeks.shares, rule.gives.shares
        reason = self._sharing.hindrance(match.outputs, match.values, did=did, will=will)
        if reason is not None:
            return _declined(match, reason)
        known = [each for each in _methods_no_more_used(match, rule) if self._motion.may_act(each)]
        known += [each for each in match.outputs if self._motion.vouches(each)]
        if known:
            return _declined(match, Reason.OPAQUE_NEIGHBOUR, known[0].name)
        return None if _fits(rule, match.inputs) else _declined(match, Reason.LITERAL_UNFIT, rule.name)

    def note(self, match: Match, rule: Rule, outputs: Iterable[Node], made: Iterable[Node], before: Node) -> None:
        """Know that a rule was applied to a match.

        Args:
            match: where.
            rule: which.
            outputs: what took the place of the match's outputs.
            made: the nodes that were put in.
            before: where they were put in.
        """
        if rule.gives.shares:
            self._sharing.join(match.outputs, match.values)
        self._places.update(dict.fromkeys(made, self._places[before]))
        for new, old in zip(outputs, match.outputs, strict=True):
            if new not in match.values:
                self._sharing.stand_in(new, old)


def insertion(match: Match) -> Node:
    """Return the node before which the replacement stands: the last of the match, or an earlier user of its results."""
    nodes = set(match.nodes)
    users = [user for output in match.outputs for user in output.users if user not in nodes]
    return min([match.nodes[-1], *users])


def is_used(match: Match) -> bool:
    """Whether anything but the match itself uses a result of it: what nobody uses is left to `dead_code`."""
    return bool(_used(match))


def _used(match: Match) -> set[Node]:
    nodes = set(match.nodes)
    return {each for each in match.outputs if not nodes.issuperset(each.users)}


def _methods_no_more_used(match: Match, rule: Rule) -> list[Node]:
    """Return the inputs that are results of methods and that nothing would use any more."""
    own = [each for each in match.values if each.op == "call_method" and match.alone_uses(each)]
    if not own:
        return own
    used = _used(match)
    pairs = zip(rule.gives.outputs, match.outputs, strict=True)
    open_ends, needed = [mine for mine, output in pairs if output in used], set[Node]()
    while open_ends:
        node = open_ends.pop()
        if node not in needed:
            needed.add(node)
            open_ends.extend(node.all_input_nodes)
    kept = [match.inputs[str(each.target)] for each in rule.gives.inputs if each in needed]
    return [each for each in own if not any(each is other for other in kept)]


def _fits(rule: Rule, inputs: Mapping[str, Any]) -> bool:
    """Whether literals stand only where the replacement's operators take any."""
    plain: dict[Node, Any] = {each: inputs[str(each.target)] for each in rule.gives.inputs}
    plain = {each: value for each, value in plain.items() if not isinstance(value, Node)}
    if not plain:
        return True
    for node in rule.gives.nodes:
        if plain.keys().isdisjoint(node.all_input_nodes):
            continue
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda each: plain.get(each, each))
        if form_of(node.target, args, kwargs) is None:
            return False
        if not any(True for _ in nodes_in((args, dict(kwargs)))):
            if getattr(node.target, "__module__", None) != "_operator":
                return False
            plain[node] = 1.0  # Python's arithmetic on numbers: a number, whichever
    return plain.keys().isdisjoint(rule.gives.outputs)


def _declined(match: Match, reason: Reason, detail: str = "") -> Declined:
    return Declined(node=match.nodes[-1].name, reason=reason, detail=detail)
