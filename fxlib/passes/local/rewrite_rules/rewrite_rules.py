"""Put the replacements of rewrite rules wherever their patterns are found."""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from typing_extensions import override

from fxlib.errors import PassError
from fxlib.passes.infra.base import Context, GraphPass, PassResult, Preserves, register_pass
from fxlib.passes.infra.edit import Replacements, splice
from fxlib.passes.local.rewrite_rules.legality import Legality, insertion, is_used
from fxlib.passes.local.rewrite_rules.matching import Bound, Program, Search, match_of
from fxlib.reasons import Declined, Reason
from fxlib.rules import Match, Rule
from fxlib.utils.location import location_of

_MAX_ROUNDS = 100
_MAX_GROWTH = 100
"""The factor by which a program may grow in nodes, where rules are applied again and again."""


@register_pass("rewrite_rules", preserves="tolerance", version="2")
class RewriteRules(GraphPass):
    """Replace what the patterns of rules match, wherever nobody could tell but by the rule's own roundings.

    Rules are applied one after another, each to the program as the one before has left it. Matches do not overlap: the
    one whose last node comes first in the program wins, and what a rule puts in is not looked at by that rule again in
    the same round. A match is declined where a value from within it is used elsewhere, or where its work cannot stand
    at one place for the sake of what lies between.
    """

    rules: tuple[Rule, ...] = ()
    """The rules, in order."""
    rounds: int = 1
    """How often to go over the program at most. More than one: until no rule finds anything, and an error if the last
    round still does."""
    bitwise: bool = False
    """Whether the rules keep all results to the bit, gradients included. It is their author's word, which sameness
    checks hold them to; without it they are held to a tolerance."""

    def __post_init__(self) -> None:
        """Take rules in any sequence.

        Raises:
            TypeError: what is given is no sequence.
            ValueError: what is given is no rule, or there is no round.
            PassError: a pattern is found in its own replacement, and there is more than one round.
        """
        if not isinstance(self.rules, (tuple, list)):
            raise TypeError(f"rules is {self.rules!r}, and no tuple of rules")
        object.__setattr__(self, "rules", tuple(self.rules))
        if not all(isinstance(each, Rule) for each in self.rules):
            raise ValueError("rules holds what is no fxlib.Rule")
        if type(self.rounds) is not int or not 1 <= self.rounds <= _MAX_ROUNDS:
            raise ValueError(f"rounds is {self.rounds!r}; it must be an integer from 1 to {_MAX_ROUNDS}")
        if self.rounds > 1:
            for rule in self.rules:
                _check_ends(rule)

    @property
    @override
    def promise(self) -> Preserves:
        return "bitwise" if self.bitwise else self.preserves

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        work = _Work(module, bitwise=self.bitwise)
        most = _MAX_GROWTH * len(module.graph.nodes)
        for _ in range(self.rounds):
            before = work.changes
            for rule in self.rules:
                work.apply(rule)
                if self.rounds > 1 and len(module.graph.nodes) > most:
                    hint = "Does one rule put in what another one looks for? Leave one out, or give one round."
                    raise PassError(f"rules let the program grow beyond {most} nodes", where=work.last, hint=hint)
            if work.changes == before:
                break
        else:
            if self.rounds > 1:
                hint = "Do rules undo one another? Leave one out, or give more rounds."
                raise PassError(
                    f"rules still change the program after {self.rounds} rounds", where=work.last, hint=hint
                )
        return PassResult(module, changes=work.changes, declined=tuple(work.declined.values()))


class _Work:
    """One program, and what is known of it until a rule changes it."""

    def __init__(self, module: GraphModule, *, bitwise: bool) -> None:
        self._module, self._bitwise = module, bitwise
        self._replacements = Replacements(module.graph)
        self._program: Program | None = None
        self._legality: Legality | None = None
        self.changes = 0
        self.declined: dict[tuple[str, str], Declined] = {}
        self.last = ""
        """The rule that was applied last, and its place."""

    def apply(self, rule: Rule) -> None:
        """Apply a rule to the program as it is."""
        if self._program is None:
            self._program = Program(self._module)
        program, before = self._program, self.changes
        for node in program.calls(rule.forms[rule.anchor]):
            if program.form(node) is None:
                continue
            search, hindrances = Search(rule, program), list[Declined]()
            for bound in search.ending_in(node):
                match = match_of(self._module, rule, bound)
                if not is_used(match):
                    continue
                hindrance = self._known().hindrance(match, rule)
                if hindrance is None:
                    self.last = f"rule {rule.name!r}, {location_of(node)}"
                    self._replace(program, match, rule, bound)
                    break
                hindrances.append(hindrance)
            else:
                if search.gave_up:
                    hindrances.append(Declined(node=node.name, reason=Reason.MATCH_AMBIGUOUS, detail=rule.name))
                self.declined.update({(rule.name, each.node): each for each in hindrances[:1]})
        if self.changes > before:
            self._replacements.settle()
            self._program = self._legality = None

    def _known(self) -> Legality:
        if self._legality is None:  # most patterns are found nowhere
            self._legality = Legality(self._module, bitwise=self._bitwise)
        return self._legality

    def _replace(self, program: Program, match: Match, rule: Rule, bound: Bound) -> None:
        graph, before = self._module.graph, insertion(match)
        inputs = {mine: bound[its] for mine, its in zip(rule.gives.inputs, rule.seeks.inputs, strict=True)}
        outputs, made = splice(graph, rule.gives, inputs, before=before, like=match.nodes[-1])
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


def _check_ends(rule: Rule) -> None:
    """Refuse a rule that would find its pattern in what it has just put in, for ever."""
    program = Program(GraphModule(torch.nn.Module(), rule.gives.graph))
    for node in program.calls(rule.forms[rule.anchor]):
        if any(True for _ in Search(rule, program).ending_in(node)):
            where = f"rule {rule.name!r}, {location_of(node)} of the replacement"
            hint = "Use rounds=1, or a replacement that does not contain the pattern."
            raise PassError("the pattern is found in its own replacement, for ever", where=where, hint=hint)
