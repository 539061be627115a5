"""A rewrite rule, checked on construction: a pattern, a replacement, and a condition.

Conditions on a match have names. Only these are sent, so the process that rewrites looks them up in its own list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from fxlib.analysis.effects.gradients import may_record_gradients
from fxlib.analysis.operators.canonical import Form, form_of
from fxlib.analysis.operators.layouts import layout_of
from fxlib.errors import PassError
from fxlib.rules.snippet import Snippet, inputs_in
from fxlib.wire.targets import function_name

GUARDS: dict[str, Guard] = {}
"""All guards by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Wherever `pattern` matches and `guard` agrees, `replacement` takes its place.

    Both are functions of tensors and numbers, which are traced, or GraphModules; with inputs of the same names in the
    same order, and as many outputs. An input of the pattern stands for any value of the program, or any literal; one
    that is annotated `torch.Tensor` only stands for values, and one annotated `int`, `float`, `bool` or `str` only for
    literals of that type. Literals in the pattern stand for themselves.

    >>> Rule(lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(x), name="relu_once")

    Attributes:
        pattern: the computation to look for.
        replacement: the computation to insert instead.
        guard: a further condition on a match: a function, or the name of a registered one. Only names can be sent.
        name: the rule's name in reports and errors; by default the pattern's.
    """

    pattern: Callable[..., Any] | GraphModule
    replacement: Callable[..., Any] | GraphModule
    guard: str | Guard | None = None
    _: KW_ONLY
    name: str = ""
    seeks: Snippet = field(init=False, repr=False)
    """The pattern as a snippet."""
    gives: Snippet = field(init=False, repr=False)
    """The replacement as a snippet."""
    forms: Mapping[Node, Form] = field(init=False, repr=False)
    """Forms of the pattern's nodes."""

    def __post_init__(self) -> None:
        """Trace functions, and reject invalid rules.

        Raises:
            PassError: a side cannot be traced or does more than plain work; the pattern is empty or not connected; the
                sides disagree in inputs or outputs; or the guard is unknown. The message names the rule, its source
                line and the node.
        """
        name = self.name or _name_of(self.pattern)
        object.__setattr__(self, "name", name)
        where = f"rule {name!r}"
        if isinstance(self.guard, str):
            _guard_named(self.guard, where)
        elif self.guard is not None and not callable(self.guard):
            raise PassError(f"its guard is {self.guard!r}, which is no function and no name", where=where)
        seeks = Snippet.of(self.pattern, f"{where}, pattern{_location_of(self.pattern)}")
        gives = Snippet.of(self.replacement, f"{where}, replacement{_location_of(self.replacement)}")
        object.__setattr__(self, "seeks", seeks)
        object.__setattr__(self, "gives", gives)
        object.__setattr__(self, "forms", _forms(seeks, f"{where}, pattern{_location_of(self.pattern)}"))
        _check_pattern(seeks, f"{where}, pattern{_location_of(self.pattern)}")
        _check_agreement(seeks, gives, f"{where}{_location_of(self.replacement)}")

    @property
    def anchor(self) -> Node:
        """The last node of the pattern, with which the search begins."""
        return self.seeks.nodes[-1]

    def agrees(self) -> Guard | None:
        """The guard."""
        return _guard_named(self.guard, f"rule {self.name!r}") if isinstance(self.guard, str) else self.guard

    def __repr__(self) -> str:
        """Return a text that equal rules share in every process, under which results are cached."""
        guard = self.guard if isinstance(self.guard, str) or self.guard is None else _name_of(self.guard)
        text = "\n".join(_line(node) for side in (self.seeks, self.gives) for node in side.graph.nodes)
        return f"Rule({self.name!r}, guard={guard!r}, {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _name_of(program: object) -> str:
    return str(getattr(program, "__name__", type(program).__name__))


def _location_of(program: object) -> str:
    code = getattr(program, "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def _line(node: Node) -> str:
    target = node.target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        target = str(target)
    elif callable(target):  # `F.max_pool2d` and others made alike share one qualified name
        own = f"{getattr(target, '__module__', None) or ''}.{getattr(target, '__qualname__', target)}"
        target = function_name(target) or own
    kind = node.type if node.op == "placeholder" else ""
    return f"{node.name} = {node.op} {target} {node.args} {node.kwargs} {kind}"


def _forms(pattern: Snippet, where: str) -> dict[Node, Form]:
    forms: dict[Node, Form] = {}
    for node in pattern.nodes:
        form = form_of(node.target, node.args, node.kwargs)
        if form is None:
            raise PassError(f"{node.format_node()}: no overload takes such arguments", where=f"{where}, {node.name!r}")
        forms[node] = form
    return forms


def _check_pattern(pattern: Snippet, where: str) -> None:
    if not pattern.nodes:
        raise PassError("computes nothing, and would match everywhere", where=where)
    if unused := [str(each.target) for each in pattern.inputs if each not in inputs_in(pattern)]:
        hint = "A match could not determine what the input stands for."
        raise PassError(f"does not use its input {unused[0]!r}", where=where, hint=hint)
    if any(each.op == "placeholder" for each in pattern.outputs):
        raise PassError("returns an input, which it does not compute", where=where, hint="Return computed values.")
    if len(set(pattern.outputs)) < len(pattern.outputs):
        raise PassError("returns one value twice", where=where)
    if unconnected := _unconnected(pattern):
        hint = "Write a rule for each part."
        raise PassError(
            f"consists of parts that have no value in common: {unconnected.name!r} and the end", where=where, hint=hint
        )


def _unconnected(pattern: Snippet) -> Node | None:
    """Return a node that no path of shared values connects with the last one; None if the pattern is connected."""
    reached: set[Node] = set()
    open_ends = [pattern.nodes[-1]]
    while open_ends:
        node = open_ends.pop()
        if node not in reached:
            reached.add(node)
            open_ends.extend((*node.all_input_nodes, *(each for each in node.users if each.op != "output")))
    return next((each for each in pattern.nodes if each not in reached), None)


def _check_agreement(pattern: Snippet, replacement: Snippet, where: str) -> None:
    if pattern.names != replacement.names:
        ours, theirs = (", ".join(each.names) or "nothing" for each in (pattern, replacement))
        unknown = [each for each in replacement.names if each not in pattern.names]
        problem = f"the replacement uses an unknown input, {unknown[0]!r}: " if unknown else ""
        hint = "Both must take the same inputs in the same order, used or not."
        raise PassError(f"{problem}the pattern takes ({ours}), the replacement ({theirs})", where=where, hint=hint)
    if len(pattern.outputs) != len(replacement.outputs):
        counts = f"{len(pattern.outputs)} value(s), the replacement {len(replacement.outputs)}"
        raise PassError(f"the pattern returns {counts}", where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A match of a pattern.

    Attributes:
        module: the program.
        nodes: the nodes that the replacement would replace, in program order.
        inputs: the values of the pattern's inputs, by name: nodes, or literals.
        outputs: the nodes whose values the replacement would compute, in the pattern's order.
    """

    module: GraphModule = field(repr=False)
    nodes: Sequence[Node]
    inputs: Mapping[str, Any]
    outputs: Sequence[Node]

    @property
    def values(self) -> list[Node]:
        """The inputs that are not literals."""
        return [each for each in self.inputs.values() if isinstance(each, Node)]

    def alone_uses(self, value: Node) -> bool:
        """Return whether nothing outside the match uses a value; if thousands use it, only their number is compared."""
        return len(value.users) <= len(self.nodes) and all(user in self.nodes for user in value.users)


Guard: TypeAlias = Callable[[Match], bool]


def register_guard(name: str) -> Callable[[Guard], Guard]:
    """Register a guard under a name; rules that are sent can use it if the process that rewrites registers it, too.

    Raises:
        PassError: another guard has the name.
    """

    def declare(guard: Guard) -> Guard:
        if name in GUARDS:
            raise PassError(f"another guard is called {name!r}", where=f"{guard.__module__}.{guard.__qualname__}")
        GUARDS[name] = guard
        return guard

    return declare


def _guard_named(name: str, where: str) -> Guard:
    """Return the guard with a name.

    Raises:
        PassError: there is no such guard; `where` names the rule.
    """
    if name not in GUARDS:
        raise PassError(f"no guard is called {name!r}", where=where, hint=f"There are: {', '.join(sorted(GUARDS))}.")
    return GUARDS[name]


@register_guard("without_gradients")
def _without_gradients(match: Match) -> bool:
    """Return whether no gradients are recorded when the module runs."""
    return not may_record_gradients(match.module)


@register_guard("inputs_used_once")
def _inputs_used_once(match: Match) -> bool:
    """Return whether nothing outside the match uses its inputs."""
    return all(map(match.alone_uses, match.values))


@register_guard("same_shapes")
def _same_shapes(match: Match) -> bool:
    """Return whether all inputs are known to share shape, dtype and device, so that none is broadcast or promoted."""
    layouts = [layout_of(each) for each in match.values]
    known = [each for each in layouts if each is not None]
    return len(known) == len(layouts) and all(known[0].same_values(each) for each in known[1:])


@register_guard("floating_point")
def _floating_point(match: Match) -> bool:
    """Return whether all inputs are known to have floating-point dtypes."""
    layouts = [layout_of(each) for each in match.values]
    return all(each is not None and each.dtype.is_floating_point for each in layouts)
