"""Named conditions on a match. Names are all that travels, so the list is that of the process that rewrites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.fx import GraphModule, Node

from fxlib.analysis.effects.gradients import records_gradients
from fxlib.analysis.operators.layouts import layout_of
from fxlib.errors import PassError


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where a pattern was found.

    Attributes:
        module: the program.
        nodes: those that the replacement would stand for, in program order.
        inputs: what the pattern's inputs are, by name: nodes, or literals.
        outputs: the nodes whose values the replacement would give, in the pattern's order.
    """

    module: GraphModule = field(repr=False)
    nodes: Sequence[Node]
    inputs: Mapping[str, Any]
    outputs: Sequence[Node]

    @property
    def values(self) -> list[Node]:
        """The inputs that are no literals."""
        return [each for each in self.inputs.values() if isinstance(each, Node)]

    def alone_uses(self, value: Node) -> bool:
        """Whether nothing outside the match uses a value; of what thousands use, their number is enough to know."""
        return len(value.users) <= len(self.nodes) and all(user in self.nodes for user in value.users)


Guard: TypeAlias = Callable[[Match], bool]
GUARDS: dict[str, Guard] = {}
"""All guards by name."""


def register_guard(name: str) -> Callable[[Guard], Guard]:
    """Make a guard known under a name; rules that travel can name it where the process that rewrites registers it, too.

    Raises:
        PassError: another guard has the name.
    """

    def declare(guard: Guard) -> Guard:
        if name in GUARDS:
            raise PassError(f"another guard is called {name!r}", where=f"{guard.__module__}.{guard.__qualname__}")
        GUARDS[name] = guard
        return guard

    return declare


def guard_named(name: str, where: str) -> Guard:
    """Return the guard of a name.

    Raises:
        PassError: there is none; `where` names the rule.
    """
    if name not in GUARDS:
        raise PassError(f"no guard is called {name!r}", where=where, hint=f"There are: {', '.join(sorted(GUARDS))}.")
    return GUARDS[name]


@register_guard("without_gradients")
def _without_gradients(match: Match) -> bool:
    """No gradients are recorded when the module runs."""
    return not records_gradients(match.module)


@register_guard("inputs_used_once")
def _inputs_used_once(match: Match) -> bool:
    """Nothing but the match uses what goes into it."""
    return all(map(match.alone_uses, match.values))


@register_guard("same_shapes")
def _same_shapes(match: Match) -> bool:
    """All inputs are known to be of one shape, dtype and device, so that nothing is broadcast or promoted."""
    layouts = [layout_of(each) for each in match.values]
    known = [each for each in layouts if each is not None]
    return len(known) == len(layouts) and all(known[0].same_values(each) for each in known[1:])


@register_guard("floating_point")
def _floating_point(match: Match) -> bool:
    """All inputs are known to be of floating-point dtypes."""
    layouts = [layout_of(each) for each in match.values]
    return all(each is not None and each.dtype.is_floating_point for each in layouts)
