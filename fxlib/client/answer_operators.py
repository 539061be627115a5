"""Check which operators a rewritten graph calls, and which random numbers it draws, before a launcher runs it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Behaviours
from fxlib.analysis.operators.arguments import operator_of, written_arguments
from fxlib.analysis.operators.operator_names import called, called_module
from fxlib.client.value_numbering import Numbers
from fxlib.errors import WireError
from fxlib.passes import GraphPass
from fxlib.passes.infra.introduced import ANY_PLAIN_WORK, Introduced
from fxlib.runtime.submodules import graph_modules

_LARGE: Final = 1 << 16
"""Limit for whole numbers: one above it, or several in one call with a product above its square, make large tensors."""


def check_operators(answer: GraphModule, original: GraphModule, passes: Sequence[GraphPass] | None) -> None:
    """Check that an answer calls only operators that the original calls, or that passes of the recipe declare.

    Large whole numbers, which make large tensors, must be those that the original gives the same operator. Operators
    that work on each element by itself make no large tensors from them.

    Args:
        answer: the rewritten graph.
        original: the graph that was sent.
        passes: the passes of the recipe; None if they are not known here.

    Raises:
        WireError: the answer calls something else.
    """
    may = ANY_PLAIN_WORK if passes is None else Introduced.all_of(each.may_introduce for each in passes)
    known = _Known(original)
    for body, node in _nodes(answer):
        for name in known.foreign(node, body):
            if not (may.allows(name, known.names) or (may.plain and _is_plain(node))):
                problem = f"the rewritten graph calls {name}, which neither the original does nor a pass of the recipe"
                raise WireError(problem, where="the answer")
        sizes = called(node, body) not in may.operators and not _is_pointwise(node)
        if sizes and _is_large(node) and not known.has_given(node, body):
            problem = f"the rewritten graph gives {node.target!r} larger numbers than the original"
            raise WireError(problem, where="the answer")


class _Known:
    """The operators that an original calls, and their arguments."""

    def __init__(self, original: GraphModule) -> None:
        self._modules = {id(each) for each in original.modules()}
        self._calls: dict[str, list[Node]] = defaultdict(list)
        for body, node in _nodes(original):
            self._calls[called(node, body)].append(node)
        self.names = {*self._calls, *map(called_module, original.modules())} - {""}

    def foreign(self, node: Node, body: GraphModule) -> Iterator[str]:
        """Yield the names of everything that a node of an answer calls, except for modules of the original."""
        if node.op != "call_module":
            yield from {called(node, body)} - {""}
            return
        for each in callee(node, body).modules():
            if id(each) not in self._modules and (name := called_module(each)):
                yield name

    def has_given(self, node: Node, body: GraphModule) -> bool:
        """Whether the original gives the operator the same arguments as a node of an answer, except computed ones."""
        return any(is_of_form(_given(node), _given(each)) for each in self._calls.get(called(node, body), ()))


def _is_plain(node: Node) -> bool:
    """Whether a node is known to draw and write nothing, and takes a computed argument."""
    if node.op == "call_module" or not node.all_input_nodes:
        return False
    operator = operator_of(node)
    return operator is not None and not operator.has_effects


def _is_large(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    numbers = [abs(each) for each in pytree.tree_leaves(_given(node)) if type(each) is int]
    return any(each > _LARGE for each in numbers) or math.prod(max(each, 1) for each in numbers) > _LARGE**2


def _is_pointwise(node: Node) -> bool:
    """Whether an operator works on each element by itself, in at least one of its forms."""
    target: Any = getattr(node.target, "overloadpacket", node.target)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    packet = getattr(torch.ops.aten, _ARITHMETIC.get(name.strip("_"), name.strip("_")), None)
    # `__getattr__` itself would make another object of each overload, and leave that in the place of torch's.
    overloads = () if packet is None else (getattr(packet, each) for each in packet.overloads())
    return any(torch.Tag.pointwise in each.tags for each in overloads)


_ARITHMETIC: Final = {"truediv": "div", **{f"i{name}": name for name in ("add", "sub", "mul", "pow")}}


def _given(node: Node) -> tuple[Any, Any]:
    return node.args, node.kwargs


def check_draws(answer: GraphModule, original: GraphModule, passes: Sequence[GraphPass] | None) -> None:
    """Check that an answer advances torch's generators as the original does, if the recipe's passes are bitwise.

    Then the answer has to draw the same numbers in the same order. Otherwise it may omit draws, and may not add any.

    Args:
        answer: the rewritten graph.
        original: the graph that was sent.
        passes: the passes of the recipe; None if they are not known here.

    Raises:
        WireError: the answer draws differently.
    """
    known = [] if passes is None else list(passes)
    bitwise = passes is not None and all(each.promise == "bitwise" for each in known)
    numbers = Numbers() if bitwise and not any(map(_changes_work, known)) else None
    drawn, own = _draws(answer, numbers), _draws(original, numbers)
    left = iter(own)
    kept = all(any(one.is_like(other) for other in left) for one in drawn)
    if not kept or (bitwise and len(drawn) != len(own)):
        problem = "the rewritten graph draws random numbers otherwise than the original"
        raise WireError(problem, where="the answer")


def _changes_work(step: GraphPass) -> bool:
    """Whether a pass computes values differently from the program, even if with the same results."""
    may = step.may_introduce
    local = any(not name.startswith("fxlib.") for name in may.operators)
    return bool("weights" in step.needs or may.plain or may.in_place or may.namespaces or local)


def check_writes(answer: GraphModule, original: GraphModule, passes: Sequence[GraphPass] | None) -> None:
    """Check that an answer writes over no parameter, buffer or argument that the original leaves as it is.

    Nothing is asked of passes that let operators write in place: they see more of memory than is looked at here.

    Args:
        answer: the rewritten graph.
        original: the graph that was sent.
        passes: those of the recipe; None: nobody here knows them.

    Raises:
        WireError: it does.
    """
    if any(each.may_introduce.in_place for each in passes or ()):
        return
    if more := sorted(_written(answer) - _written(original)):
        path, name = more[0]
        problem = f"the rewritten graph writes over {f'{path}.{name}'.lstrip('.')}, which the original leaves as it is"
        raise WireError(problem, where="the answer")


def _written(module: GraphModule) -> set[tuple[str, str]]:
    """Return what a module was given or holds that may be written, by the path of the graph and the name in it."""
    found = set()
    for path, body in graph_modules(module):
        writing = [(node, operator) for node in body.graph.nodes if (operator := operator_of(node)) and operator.writes]
        if not writing:
            continue
        aliases = Effects.of(body).aliases
        written = {aliases.of(each) for node, operator in writing for each in written_arguments(node, operator)}
        outside = (node for node in body.graph.nodes if node.op in ("placeholder", "get_attr"))
        found |= {(path, str(node.target)) for node in outside if aliases.of(node) in written}
    return found


@dataclass(frozen=True, slots=True)
class _Draw:
    """A node that draws random numbers, or calls a graph that does.

    Attributes:
        path: the path of the graph that has the node.
        name: the name of the operator or module that it calls.
        module: the module that it calls, unless that contains graphs, which are an answer's own.
        given: its arguments.
        values: the value numbers of its arguments, if they are known.
    """

    path: str
    name: str
    module: nn.Module | None
    given: tuple[Any, Any]
    values: tuple[int, ...]

    def is_like(self, other: _Draw) -> bool:
        """Whether it draws the same numbers as another one would in its position."""
        same = (self.path, self.name, self.values) == (other.path, other.name, other.values)
        return same and self.module is other.module and is_of_form(self.given, other.given)


def _draws(module: GraphModule, numbers: Numbers | None) -> list[_Draw]:
    """Return the draws of all graphs, each graph's in order."""
    graphs = dict(graph_modules(module))
    drawing = {node for body in graphs.values() for node in _drawing(body)}
    within = {body for body in graphs.values() if not drawing.isdisjoint(body.graph.nodes)}
    found = [
        (path, body, node)
        for path, body in graphs.items()
        for node in body.graph.nodes
        if node in drawing or (node.op == "call_module" and within.intersection(callee(node, body).modules()))
    ]
    known = {} if numbers is None or not found else numbers.of(module)
    draws = []
    for path, body, node in found:
        entered = callee(node, body) if node.op == "call_module" else None
        name = str(node.target) if entered is not None else called(node, body)
        made = entered is None or any(isinstance(each, GraphModule) for each in entered.modules())
        values = () if numbers is None else tuple(numbers.value(each, known) for each in _given(node))
        draws.append(_Draw(path, name, None if made else entered, _given(node), values))
    return draws


def _drawing(body: GraphModule) -> Iterator[Node]:
    behaviours = Behaviours(body)
    for node in body.graph.nodes:
        operator = behaviours.of(node).operator
        if operator is not None and operator.random:
            yield node


def callee(node: Node, body: GraphModule) -> nn.Module:
    """Return the module that a node of a graph calls."""
    return body.get_submodule(str(node.target))


def _nodes(module: GraphModule) -> Iterator[tuple[GraphModule, Node]]:
    return ((body, node) for _, body in graph_modules(module) for node in body.graph.nodes)


def form_of(value: Any) -> Hashable:
    """Return the form of an argument; of two with the same form, each is of the form of the other (`is_of_form`)."""
    if isinstance(value, Node):
        return Node
    if isinstance(value, (tuple, list)):
        return (tuple, *map(form_of, value))
    if isinstance(value, Mapping):
        return (dict, *value, *map(form_of, value.values()))
    if isinstance(value, slice):
        return (slice, form_of(value.start), form_of(value.stop), form_of(value.step))
    return type(value), repr(value)


def is_of_form(value: Any, other: Any) -> bool:
    """Whether an argument has the form of another: its containers, its constants, and nodes where that has nodes."""
    if isinstance(other, Node):
        return isinstance(value, (Node, bool, int, float, complex))
    if isinstance(other, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(other) and all(map(is_of_form, value, other))
    if isinstance(other, Mapping):
        return (
            isinstance(value, Mapping)
            and list(value) == list(other)
            and all(is_of_form(value[name], other[name]) for name in other)
        )
    if isinstance(other, slice):
        parts = ("start", "stop", "step")
        return isinstance(value, slice) and all(is_of_form(getattr(value, at), getattr(other, at)) for at in parts)
    return type(value) is type(other) and repr(value) == repr(other)
