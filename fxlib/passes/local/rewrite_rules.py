"""Apply rewrite rules: replace each match of a pattern by the rule's replacement.

A pattern matches however it and the program are written. The effects model decides whether the replacement may take the
place of a match.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from typing_extensions import override

from fxlib.analysis.effects.gradients import may_record_gradients
from fxlib.analysis.effects.local_work import Motion, Sharing
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import containers_made
from fxlib.analysis.operators.arguments import frozen, nodes_in
from fxlib.analysis.operators.canonical import Form, Forms, form_of
from fxlib.errors import PassError
from fxlib.passes.infra.base import Context, GraphPass, PassResult, Preserves, register_pass
from fxlib.passes.infra.edit import Replacements, splice
from fxlib.passes.infra.introduced import NOTHING, Introduced
from fxlib.reasons import Declined, Reason
from fxlib.rules.rule import Match, Rule
from fxlib.utils.text import location_of

_MAX_ROUNDS = 100
_MAX_GROWTH = 100
"""Factor by which a program may grow in nodes if rules are applied repeatedly."""


@register_pass("rewrite_rules", preserves="tolerance", introduces=NOTHING, version="5")
class RewriteRules(GraphPass):
    """Replace the matches of rules where the replacement differs by nothing but the rule's own rounding.

    Rules are applied one after another, each to the program as the previous one left it. Matches do not overlap: the
    one whose last node comes first in the program wins, and in the same round a rule does not match nodes that it
    inserted itself. A match is declined if a value inside it is used elsewhere, or if the nodes between its own prevent
    its work from running at one position.
    """

    rules: tuple[Rule, ...] = ()
    """The rules, in order."""
    rounds: int = 1
    """Maximum number of rounds over the program. With more than one, rules are applied until none finds anything; it is
    an error if the last round still does."""
    bitwise: bool = False
    """Whether the rules preserve all results to the bit, gradients included. This is their author's word, which the
    bitwise checks verify; otherwise results are checked against a tolerance."""

    def __post_init__(self) -> None:
        """Accept rules in any sequence.

        Raises:
            TypeError: the value is not a sequence.
            ValueError: an item is not a rule, or the number of rounds is not valid.
            PassError: a pattern matches its own replacement, and there is more than one round.
        """
        if not isinstance(self.rules, (tuple, list)):
            raise TypeError(f"rules is {self.rules!r}, which is not a tuple of rules")
        object.__setattr__(self, "rules", tuple(self.rules))
        if not all(isinstance(each, Rule) for each in self.rules):
            raise ValueError("rules holds something that is not an fxlib.Rule")
        if type(self.rounds) is not int or not 1 <= self.rounds <= _MAX_ROUNDS:
            raise ValueError(f"rounds is {self.rounds!r}; it must be an integer from 1 to {_MAX_ROUNDS}")
        if self.rounds > 1:
            for rule in self.rules:
                _check_ends(rule)

    @property
    @override
    def promise(self) -> Preserves:
        return "bitwise" if self.bitwise else self.preserves

    @property
    @override
    def may_introduce(self) -> Introduced:
        return Introduced.of(*(node.target for rule in self.rules for node in rule.gives.nodes))

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        work = _Work(module, bitwise=self.bitwise)
        most = _MAX_GROWTH * len(module.graph.nodes)
        for _ in range(self.rounds):
            before = work.changes
            for rule in self.rules:
                work.apply(rule)
                if self.rounds > 1 and len(module.graph.nodes) > most:
                    hint = "Does one rule insert what another one matches? Leave one out, or use one round."
                    raise PassError(f"rules let the program grow beyond {most} nodes", where=work.last, hint=hint)
            if work.changes == before:
                break
        else:
            if self.rounds > 1:
                hint = "Do rules undo one another? Leave one out, or use more rounds."
                raise PassError(
                    f"rules still change the program after {self.rounds} rounds", where=work.last, hint=hint
                )
        return PassResult(module, changes=work.changes, declined=tuple(work.declined.values()))


class _Work:
    """One program, and the analyses of it until a rule changes it."""

    def __init__(self, module: GraphModule, *, bitwise: bool) -> None:
        self._module, self._bitwise = module, bitwise
        self._replacements = Replacements(module.graph)
        self._program: ProgramIndex | None = None
        self._legality: Legality | None = None
        self.changes = 0
        self.declined: dict[tuple[str, str], Declined] = {}
        self.last = ""
        """The rule that was applied last, and its position."""

    def apply(self, rule: Rule) -> None:
        """Apply a rule to the program in its present form."""
        if self._program is None:
            self._program = ProgramIndex(self._module)
        program, before = self._program, self.changes
        for node in program.calls(rule.forms[rule.anchor]):
            if program.form(node) is None:
                continue
            search, refusals = Search(rule, program), list[Declined]()
            for bound in search.ending_in(node):
                match = match_of(self._module, rule, bound)
                if not is_used(match):
                    continue
                refusal = self._known().refusal(match, rule)
                if refusal is None:
                    self.last = f"rule {rule.name!r}, {location_of(node)}"
                    self._replace(program, match, rule, bound)
                    break
                refusals.append(refusal)
            else:
                if search.gave_up:
                    refusals.append(Declined(node=node.name, reason=Reason.MATCH_AMBIGUOUS, detail=rule.name))
                self.declined.update({(rule.name, each.node): each for each in refusals[:1]})
        if self.changes > before:
            self._replacements.settle()
            self._program = self._legality = None

    def _known(self) -> Legality:
        if self._legality is None:  # most patterns match nowhere
            self._legality = Legality(self._module, bitwise=self._bitwise)
        return self._legality

    def _replace(self, program: ProgramIndex, match: Match, rule: Rule, bound: Bindings) -> None:
        graph, before = self._module.graph, insertion(match)
        inputs = {mine: bound[its] for mine, its in zip(rule.gives.inputs, rule.seeks.inputs, strict=True)}
        outputs, made = splice(graph, rule.gives, inputs, before=before, like=match.nodes[-1])
        _order(made, match)
        self._known().note(match, rule, outputs, made, before)
        for old, new in zip(match.outputs, outputs, strict=True):
            self._replacements.replace(old, new)
            program.replace(old, new)
        for old in reversed(match.nodes):
            if old not in match.outputs:
                program.replace(old, None)
            self._replacements.erase(old)
        for new in reversed(made):
            if not new.users:
                graph.erase_node(new)
        self.changes += 1


def _order(made: Iterable[Node], match: Match) -> None:
    """Place new nodes in the program as captured: where the match begins, or right after their latest input.

    Nothing that the program cannot take back lies within a match. What else lies there would have run after the first
    error of the match, whichever node of it that error comes from.
    """
    if known := [node.meta["order"] for node in match.nodes if "order" in node.meta]:
        for node in made:
            needed = (value.meta.get("order", 0) for value in node.all_input_nodes)
            node.meta["order"] = max(min(known), *needed, 0)


def _check_ends(rule: Rule) -> None:
    """Reject a rule that would match its own replacement again and again."""
    program = ProgramIndex(GraphModule(torch.nn.Module(), rule.gives.graph))
    for node in program.calls(rule.forms[rule.anchor]):
        if any(True for _ in Search(rule, program).ending_in(node)):
            where = f"rule {rule.name!r}, {location_of(node)} of the replacement"
            hint = "Use rounds=1, or a replacement that does not contain the pattern."
            raise PassError("the pattern matches its own replacement, without end", where=where, hint=hint)


Bindings: TypeAlias = dict[Node, Any]
"""For each node and input of a pattern, the node of the program that it matches; an input may match a literal."""
_Goal: TypeAlias = tuple[Node, Any]
_STEPS = 4096
"""Maximum number of nodes compared for one end of a pattern. Within this limit, matching takes linear time; only a
pattern with dozens of operators whose operands may be swapped exceeds it."""


class ProgramIndex:
    """The nodes of a program by the operator they call, as they were before any rule was applied to them."""

    def __init__(self, module: GraphModule) -> None:
        """Determine the form of every node, in one pass."""
        forms = Forms(module, containers_made(module.graph.nodes))
        self._forms = {node: form for node in module.graph.nodes if (form := forms.of(node)) is not None}
        self._calls: dict[Hashable, list[Node]] = defaultdict(list)
        self._became: dict[Node, Node] = {}
        for node, form in self._forms.items():
            self._calls[form.key].append(node)

    def calls(self, form: Form) -> list[Node]:
        """Return the nodes that call an operator, in program order."""
        return self._calls.get(form.key, [])

    def form(self, node: Node) -> Form | None:
        """Return the form of a node; None if it has none, or a rule has made or replaced it."""
        return self._forms.get(node)

    def replace(self, node: Node, by: Node | None) -> None:
        """Record that a node was replaced, and by what."""
        del self._forms[node]
        if by is not None:
            self._became[node] = by

    def current(self, value: Any) -> Any:
        """Return the replacement of a value, or the value itself if it was not replaced."""
        while isinstance(value, Node) and value in self._became:
            value = self._became[value]
        return value


class Search:
    """All ways in which a pattern can end in one node of a program, in a fixed order."""

    def __init__(self, rule: Rule, program: ProgramIndex) -> None:
        """Prepare the search for a rule's pattern."""
        self._rule, self._program = rule, program
        self._left = _STEPS

    @property
    def gave_up(self) -> bool:
        """Whether there were too many ways to try them all."""
        return self._left <= 0

    def ending_in(self, node: Node) -> Iterator[Bindings]:
        """Yield the match of each node of the pattern, with `node` as the match of the last one."""
        return self._solve([(self._rule.anchor, node)], {})

    def _solve(self, goals: list[_Goal], bound: Bindings) -> Iterator[Bindings]:
        forms, program = self._rule.forms, self._program
        while goals and self._left > 0:
            self._left -= 1
            wanted, value = goals.pop()
            value = program.current(value)
            if wanted in bound:
                if not _is_same(bound[wanted], value):
                    return
            elif wanted.op == "placeholder":
                if not _admits(wanted, value):
                    return
                bound[wanted] = value
            else:
                mine, form = forms[wanted], program.form(value) if isinstance(value, Node) else None
                if form is None or form.key != mine.key:
                    return
                bound[wanted] = value
                ways = _ways(mine, form)
                if not ways:
                    return
                for each in ways[:-1]:
                    yield from self._solve([*goals, *each], dict(bound))
                goals.extend(ways[-1])
        if not self.gave_up:
            yield from self._onward(bound)

    def _onward(self, bound: Bindings) -> Iterator[Bindings]:
        """Continue with a part of the pattern that the matched nodes do not need, but share a value with."""
        nodes = self._rule.seeks.nodes
        wanted = next(
            (each for each in nodes if each not in bound and any(v in bound for v in each.all_input_nodes)), None
        )
        if wanted is None:
            outputs = self._rule.seeks.outputs
            if len({bound[each] for each in outputs}) == len(outputs):
                yield bound
            return
        values = [bound[each] for each in wanted.all_input_nodes if each in bound]
        nearby = min((each.users for each in values if isinstance(each, Node)), key=len, default={})
        for user in nearby:
            self._left -= 1
            if self.gave_up:
                return
            yield from self._solve([(wanted, user)], dict(bound))


def _ways(mine: Form, form: Form) -> list[list[_Goal]]:
    ways = [_pairs(mine.operands, form.operands)]
    if mine.commutes:
        first, second, *rest = form.operands
        ways.append(_pairs(mine.operands, (second, first, *rest)))
    return [each for each in ways if each is not None]


def _pairs(wanted: Any, found: Any) -> list[_Goal] | None:
    """Return which nodes of the pattern must match which values for two operands to agree; None if they cannot."""
    if isinstance(wanted, Node):
        return [(wanted, found)]
    if wanted is found:
        return []
    if isinstance(wanted, slice) and isinstance(found, slice):
        return _pairs((wanted.start, wanted.stop, wanted.step), (found.start, found.stop, found.step))
    if isinstance(wanted, dict) and isinstance(found, dict) and list(wanted) == list(found):
        return _pairs(tuple(wanted.values()), tuple(found.values()))
    if isinstance(wanted, (tuple, list)) and isinstance(found, (tuple, list)):
        goals: list[_Goal] = []
        for one, other in zip(wanted, found, strict=False):
            more = _pairs(one, other)
            if more is None:
                return None
            goals.extend(more)
        return goals if len(wanted) == len(found) else None
    alike = not isinstance(found, Node) and frozen(wanted) == frozen(found)
    return [] if alike else None


def _admits(wanted: Node, value: Any) -> bool:
    """Return whether an input of the pattern may stand for a value."""
    kind: object = wanted.type
    if kind is torch.Tensor:
        return isinstance(value, Node)
    if kind in (int, float, bool, str):
        return type(value) is kind
    return isinstance(value, Node) or not any(True for _ in nodes_in(value))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Node) or isinstance(other, Node):
        return one is other
    return frozen(one) == frozen(other)


def match_of(module: GraphModule, rule: Rule, bound: Mapping[Node, Any]) -> Match:
    """Return the result of a search in the form that guards and the effects model use."""
    return Match(
        module=module,
        nodes=sorted({bound[each] for each in rule.seeks.nodes}),
        inputs={str(each.target): bound[each] for each in rule.seeks.inputs},
        outputs=[bound[each] for each in rule.seeks.outputs],
    )


class Legality:
    """Decides, for the program as it was and the replacements made since, whether rules may be applied."""

    def __init__(self, module: GraphModule, *, bitwise: bool) -> None:
        """Analyse a program; with `bitwise`, gradients must be summed in their original order."""
        effects, self._records = Effects.of(module), may_record_gradients(module)
        self._motion = Motion(module, effects, keep_gradients=bitwise and self._records)
        self._sharing = Sharing(effects)
        self._positions = dict(effects.index)

    def refusal(self, match: Match, rule: Rule) -> Declined | None:
        """Return why a rule may not be applied to a match; None if it may."""
        found = self._torn(match) or self._misplaced(match, rule) or self._distinguishable(match, rule)
        guard = rule.agrees()
        if found is not None or guard is None:
            return found
        try:
            agrees = guard(match)
        except Exception as error:
            error.add_note(f"The guard of the rule {rule.name!r} was running.")
            raise
        return None if agrees else _declined(match, Reason.GUARD, rule.name)

    def _torn(self, match: Match) -> Declined | None:
        """Return why the match cannot be removed from the program."""
        nodes = set(match.nodes)
        for node in match.nodes:
            outside = next((user for user in node.users if user not in nodes), None)
            if outside is not None and node not in match.outputs:
                return _declined(match, Reason.USED_OUTSIDE, f"{node.name}, by {outside.name}")
            if (reason := self._motion.unfit(node)) is not None:
                return _declined(match, reason, node.name)
        within = next((each for each in match.values if each in nodes), None)
        if within is None:
            return None
        return _declined(match, Reason.USED_OUTSIDE, f"{within.name}, which is also an input of it")

    def _misplaced(self, match: Match, rule: Rule) -> Declined | None:
        """Return why the work of the match cannot all run at one position."""
        before = insertion(match)
        if late := next((each for each in match.values if not each < before), None):
            return _declined(match, Reason.USED_BEFORE, f"{before.name} uses a result before {late.name} is there")
        at = self._positions[before]
        reason = self._motion.refusal(match.nodes, at)
        if reason is None and self._records and rule.gives.saves:
            values = map(self._sharing.original, (*match.values, *match.outputs))
            reason = Reason.MAY_BE_SAVED if any(self._motion.written_from(each, at) for each in values) else None
        return None if reason is None else _declined(match, reason)

    def _distinguishable(self, match: Match, rule: Rule) -> Declined | None:
        """Return how the replacement could be distinguished from the match."""
        did, will = rule.seeks.shares, rule.gives.shares
        reason = self._sharing.refusal(match.outputs, match.values, did=did, will=will)
        if reason is not None:
            return _declined(match, reason)
        known = [each for each in _methods_no_more_used(match, rule) if self._motion.may_act(each)]
        known += [each for each in match.outputs if self._motion.vouches(each)]
        if known:
            return _declined(match, Reason.OPAQUE_NEIGHBOUR, known[0].name)
        return None if _fits(rule, match.inputs) else _declined(match, Reason.LITERAL_UNFIT, rule.name)

    def note(self, match: Match, rule: Rule, outputs: Iterable[Node], made: Iterable[Node], before: Node) -> None:
        """Record that a rule was applied to a match.

        Args:
            match: the match.
            rule: the rule.
            outputs: the values that replaced the match's outputs.
            made: the nodes that were inserted.
            before: the node before which they were inserted.
        """
        if rule.gives.shares:
            self._sharing.join(match.outputs, match.values)
        self._positions.update(dict.fromkeys(made, self._positions[before]))
        for new, old in zip(outputs, match.outputs, strict=True):
            if new not in match.values:
                self._sharing.stand_in(new, old)


def insertion(match: Match) -> Node:
    """Return the node before which the replacement goes: the last of the match, or an earlier user of a result."""
    nodes = set(match.nodes)
    users = [user for output in match.outputs for user in output.users if user not in nodes]
    return min([match.nodes[-1], *users])


def is_used(match: Match) -> bool:
    """Return whether anything outside the match uses a result of it; unused results are left to `dead_code`."""
    return bool(_used(match))


def _used(match: Match) -> set[Node]:
    nodes = set(match.nodes)
    return {each for each in match.outputs if not nodes.issuperset(each.users)}


def _methods_no_more_used(match: Match, rule: Rule) -> list[Node]:
    """Return the inputs that are results of methods and would have no user any more."""
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
    """Return whether literals occur only where the replacement's operators accept them."""
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
            plain[node] = 1.0  # Python's arithmetic on numbers gives a number in any case
    return plain.keys().isdisjoint(rule.gives.outputs)


def _declined(match: Match, reason: Reason, detail: str = "") -> Declined:
    return Declined(node=match.nodes[-1].name, reason=reason, detail=detail)
