"""Where a pattern is found in a program, whichever way either of them is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from fxlib.analysis.operators.access import frozen, nodes_in
from fxlib.analysis.operators.canonical import Form, Forms
from fxlib.rules.guards import Match
from fxlib.rules.rule import Rule

Bound: TypeAlias = dict[Node, Any]
"""For each node and input of a pattern, the node of the program that it is; for an input, it may be a literal."""
_Goal: TypeAlias = tuple[Node, Any]
_STEPS = 4096
"""How many nodes are compared at most for one end of a pattern. What is found within fewer is found in linear time;
more takes a pattern with dozens of operators whose operands may be swapped."""


class Program:
    """The nodes of a program by what they call, as they were before any rule was applied to them."""

    def __init__(self, module: GraphModule) -> None:
        """Bring every node into its form, in one pass."""
        forms = Forms(module)
        self._forms = {node: form for node in module.graph.nodes if (form := forms.of(node)) is not None}
        self._calls: dict[Hashable, list[Node]] = defaultdict(list)
        self._became: dict[Node, Node] = {}
        for node, form in self._forms.items():
            self._calls[form.key].append(node)

    def calls(self, form: Form) -> list[Node]:
        """Return the nodes that call an operator, in program order."""
        return self._calls.get(form.key, [])

    def form(self, node: Node) -> Form | None:
        """Return the form of a node; None if it has none, or if a rule has made or replaced it."""
        return self._forms.get(node)

    def replace(self, node: Node, by: Node | None) -> None:
        """Know that a node is no more, and what took its place."""
        del self._forms[node]
        if by is not None:
            self._became[node] = by

    def current(self, value: Any) -> Any:
        """Return what took the place of a value, if anything did."""
        while isinstance(value, Node) and value in self._became:
            value = self._became[value]
        return value


class Search:
    """All ways in which a pattern ends in one node of a program, in a fixed order."""

    def __init__(self, rule: Rule, program: Program) -> None:
        """Look for nothing yet."""
        self._rule, self._program = rule, program
        self._left = _STEPS

    @property
    def gave_up(self) -> bool:
        """Whether there were too many ways to try them all."""
        return self._left <= 0

    def ending_in(self, node: Node) -> Iterator[Bound]:
        """Yield what the pattern's nodes are, where its last one is `node`."""
        return self._solve([(self._rule.anchor, node)], {})

    def _solve(self, goals: list[_Goal], bound: Bound) -> Iterator[Bound]:
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

    def _onward(self, bound: Bound) -> Iterator[Bound]:
        """Go on to a part of the pattern that the nodes found so far do not need, but have a value in common with."""
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
    """Return which nodes of the pattern have to be which values for two operands to be alike; None if they are not."""
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
    """Whether an input of the pattern may stand for a value."""
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
    """Return what a search has found, as guards and the effects model look at it."""
    return Match(
        module=module,
        nodes=sorted({bound[each] for each in rule.seeks.nodes}),
        inputs={str(each.target): bound[each] for each in rule.seeks.inputs},
        outputs=[bound[each] for each in rule.seeks.outputs],
    )
