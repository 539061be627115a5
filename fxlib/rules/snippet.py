"""A few nodes with inputs and outputs: the pattern or the replacement of a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, get_type_hints

import torch
from torch.fx import Graph, GraphModule, Node, Tracer
from torch.fx.node import map_arg
from typing_extensions import override

from fxlib.analysis.effects.aliases import Aliases
from fxlib.analysis.effects.node_kinds import Behaviours, Part
from fxlib.analysis.operators.arguments import nodes_in, operator_of
from fxlib.analysis.operators.canonical import as_function, form_of
from fxlib.capture.intercept import Interception, is_capturing, one_at_a_time
from fxlib.errors import PassError
from fxlib.utils.generated_code import target_of

MAX_SNIPPET_NODES = 256
"""Maximum number of nodes in one snippet; patterns are searched for at every node of a program."""


_LINEAR = frozenset(
    {"add", "sub", "neg", "clone", "cat", "stack", "narrow", "select", "expand", "squeeze", "unsqueeze", "flatten"}
    | {"t", "transpose", "permute", "view", "reshape"}
)
"""Operators whose backward needs none of their arguments or results."""
_SCALES = frozenset({"mul", "div"})
"""Operators for which the same is true if all but one of their operands are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snippet:
    """A piece of plain work: it writes nothing, draws nothing, and each of its nodes serves an output."""

    graph: Graph
    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    """The nodes that compute, in order."""
    outputs: tuple[Node, ...]
    shares: bool
    """Whether an output may share memory with an input, or with another output."""
    saves: bool
    """Whether backward may need an input or an output."""

    @classmethod
    def of(cls, program: Callable[..., Any] | GraphModule, where: str) -> Snippet:
        """Read a snippet from a graph, or from a function, which is traced.

        Args:
            program: the graph or function.
            where: its name in errors.

        Raises:
            PassError: the program cannot be traced, or does more than plain work.
        """
        return _checked(program if isinstance(program, GraphModule) else _traced(program, where), where)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(str(each.target) for each in self.inputs)


class SnippetTracer(Tracer):
    """Records straight-line code, and refuses what its nodes would lose: modes, and backwards of the user's own."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in the block; gradients are on, so that a node that is made without them shows."""
        self._blocks = _autocast_blocks()
        apply: Any = torch.autograd.Function.apply
        with torch.enable_grad(), ExitStack() as stack:
            if not is_capturing():  # a snippet within another one is refused what that is
                stack.enter_context(one_at_a_time)
                stack.enter_context(Interception()).function(apply.__func__, lambda _: _refuse_function)
            yield

    @override
    def create_node(self, kind: str, target: Any, args: Any, *rest: Any, **options: Any) -> Node:
        if not torch.is_grad_enabled():
            raise PassError("turns gradients off for a part of its work, which no snippet holds", hint=_DETACH)
        if _autocast_blocks() != self._blocks:
            raise PassError("enters autocast for a part of its work, which no snippet holds", hint=_CAST)
        return super().create_node(kind, target_of(target, args), args, *rest, **options)


_DETACH = "Use detach() for what has no gradient."
_CAST = "Convert with to()."


def _autocast_blocks() -> int:
    """Return how many blocks of autocast this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _refuse_function(cls: type, *_: object, **__: object) -> NoReturn:
    hint = "Write its forward and backward as operators, with detach() where they differ."
    raise PassError(f"calls {cls.__name__}, a torch.autograd.Function, whose backward would be lost", hint=hint)


def _traced(function: Callable[..., Any], where: str) -> GraphModule:
    tracer = SnippetTracer()
    try:
        with tracer.recording():
            graph = tracer.trace(function)
        module = GraphModule(tracer.root, graph)
        kinds = get_type_hints(function)
    except PassError as error:
        raise PassError(str(error), where=where) from error
    except Exception as error:  # the user's own code, run with proxies
        hint = "Write it as straight-line code on tensors and numbers, or give a GraphModule."
        raise PassError(f"cannot be traced: {error}", where=where, hint=hint) from error
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.type = kinds.get(str(node.target))
    return module


def _checked(module: GraphModule, where: str) -> Snippet:
    if len(module.graph.nodes) > MAX_SNIPPET_NODES:
        raise PassError(f"has {len(module.graph.nodes)} nodes, and may have {MAX_SNIPPET_NODES}", where=where)
    if any(node.op == "placeholder" and str(node.target).startswith("*") for node in module.graph.nodes):
        raise PassError("takes a variable number of inputs", where=where, hint="Name each of them.")
    if not any(node.op == "output" for node in module.graph.nodes):
        raise PassError("returns nothing", where=where, hint="Return a value, or a tuple of values.")
    graph = _functional(module, where)
    plain = GraphModule(torch.nn.Module(), graph)
    behaviours = Behaviours(plain)
    for node in _calls(graph):
        _check_plain(node, behaviours, where)
    _drop_unused(graph)
    nodes, outputs = _calls(graph), _outputs(graph, where)
    return Snippet(
        graph=graph,
        inputs=tuple(node for node in graph.nodes if node.op == "placeholder"),
        nodes=nodes,
        outputs=outputs,
        shares=_shares(plain, outputs),
        saves=any(map(_saves, nodes)),
    )


def _functional(module: GraphModule, where: str) -> Graph:
    """Return a copy of the graph with functions for modules."""
    graph, copied = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            hint = "Take it as an input, or write a number."
            raise PassError(f"holds a tensor or an object of its own, {node.target!r}", where=where, hint=hint)
        copied[node] = _copy(module, node, graph, copied, where)
    return graph


def _calls(graph: Graph) -> tuple[Node, ...]:
    return tuple(node for node in graph.nodes if node.op.startswith("call"))


def _copy(module: GraphModule, node: Node, graph: Graph, copied: Mapping[Node, Node], where: str) -> Node:
    args, kwargs = map_arg((node.args, node.kwargs), copied.__getitem__)
    if node.op != "call_module":
        made = graph.create_node(node.op, node.target, args, kwargs, name=node.name, type_expr=node.type)
    elif (written := as_function(module, node)) is not None:
        function, given, options = written
        made = graph.call_function(function, map_arg(given, copied.__getitem__), options)
    else:
        kind = type(module.get_submodule(str(node.target))).__name__
        hint = "Write it as a function, with its weights as inputs."
        raise PassError(f"calls the module {node.target!r}, a {kind}", where=where, hint=hint)
    made.meta.update(node.meta)
    return made


def _drop_unused(graph: Graph) -> None:
    """Erase the calls that no output needs; all of them must be plain work."""
    for node in reversed(_calls(graph)):
        if not node.users:
            graph.erase_node(node)


def _check_plain(node: Node, behaviours: Behaviours, where: str) -> None:
    behaviour, named = behaviours.of(node), f"{where}, node {node.name!r}"
    # A snippet works on tensors: a method whose result nobody takes is a tensor's, too.
    is_tensors = not node.users and behaviours.may_act(node)
    operator = operator_of(node) if is_tensors else behaviour.operator
    if operator is None or not (is_tensors or behaviour.part is Part.LOCAL):
        raise PassError(f"calls {_named(node)}, whose effects are unknown", where=named)
    if operator.random:
        raise PassError(f"calls {_named(node)}, which draws random numbers", where=named)
    if operator.writes or operator.written_state:
        hint = "Use the form that returns a new value."
        raise PassError(f"calls {_named(node)}, which writes to its argument", where=named, hint=hint)


def _outputs(graph: Graph, where: str) -> tuple[Node, ...]:
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    if not outputs or not all(isinstance(each, Node) for each in outputs):
        raise PassError(f"returns {returned!r}", where=where, hint="Return a value, or a tuple of values.")
    return tuple(each for each in outputs if isinstance(each, Node))


def _shares(module: GraphModule, outputs: tuple[Node, ...]) -> bool:
    nodes, behaviours = list(module.graph.nodes), Behaviours(module)
    aliases = Aliases(module, nodes, [behaviours.of(node) for node in nodes], distinct_inputs=True)
    inputs = {aliases.of(node) for node in nodes if node.op == "placeholder"}
    classes = [aliases.of(node) for node in outputs]
    return len(set(classes)) < len(classes) or not inputs.isdisjoint(classes)


def _saves(node: Node) -> bool:
    form = form_of(node.target, node.args, node.kwargs)
    if form is None:
        return True
    scaled = form.operator in _SCALES and len(node.all_input_nodes) == 1 and isinstance(form.operands[0], Node)
    return not (scaled or form.operator in _LINEAR)


def _named(node: Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", node.target))


def inputs_in(snippet: Snippet) -> set[Node]:
    """Return the inputs that the snippet's nodes use."""
    return {each for node in snippet.nodes for each in nodes_in((node.args, dict(node.kwargs)))} & set(snippet.inputs)
