"""Copies of modules for passes to work on, and edits that several passes make: replacing values, inserting snippets.

They take time proportional to the edges of a graph, however many inputs a node has.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxlib.errors import PassError
from fxlib.rules.snippet import Snippet
from fxlib.runtime.failure import program_order
from fxlib.runtime.lowering import BACKEND
from fxlib.runtime.submodules import TABLES, local_modules

VALUE_KEYS: Final = ("val", "tensor_meta")
"""Keys of a node's `meta` that describe its value: dtype, shape and strides."""
_WIDE = 32
"""Nodes with more inputs get their new ones together, since replacing a single input costs as much as all of them."""


class Replacements:
    """Replacements in one graph. They apply to all users at once, but inputs of wide nodes wait for `settle`."""

    def __init__(self, graph: Graph) -> None:
        """Start without replacements."""
        self._graph = graph
        self._wide: dict[Node, bool] = {}
        self._waiting: dict[Node, dict[Node, Node]] = {}
        """Replacements of the inputs of wide nodes."""
        self._erased: list[Node] = []

    def replace(self, old: Node, new: Node) -> None:
        """Let all users of a value use another one."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: not self._is_wide(user))
        for user in old.users:
            self._waiting.setdefault(user, {})[old] = new
            new.users.setdefault(user)

    def erase(self, node: Node) -> None:
        """Erase a node whose users all have another value instead."""
        if node in self._waiting:
            self._settle(node)
        if node.users:
            node.args, node.kwargs = (), {}
            self._erased.append(node)
        else:
            self._graph.erase_node(node)

    def settle(self) -> None:
        """Give wide nodes their new inputs."""
        for node in list(self._waiting):
            self._settle(node)
        for node in self._erased:
            self._graph.erase_node(node)
        self._erased.clear()

    def _settle(self, node: Node) -> None:
        became = self._waiting.pop(node)

        def current(value: Node) -> Any:
            while value in became:
                value = became[value]
            return value

        node.args, node.kwargs = map_arg((node.args, dict(node.kwargs)), current)
        inputs = set(node.all_input_nodes)
        for value in became.values():
            if value not in inputs:
                value.users.pop(node, None)

    def _is_wide(self, node: Node) -> bool:
        if node not in self._wide:
            self._wide[node] = len(node.all_input_nodes) > _WIDE
        return self._wide[node]


Spliced: TypeAlias = tuple[list[Node], list[Node]]
_KEPT = ("order", "source", "stack_trace", "nn_module_stack")
"""Metadata that a new node takes from the node that it replaces: its position in the model, but none of its value's."""


def splice(graph: Graph, snippet: Snippet, inputs: Mapping[Node, Any], *, before: Node, like: Node) -> Spliced:
    """Insert a snippet's nodes, and return its outputs, which may be inputs, and the new nodes.

    Args:
        graph: the graph of the program.
        snippet: the snippet to insert.
        inputs: nodes of the program, or literals, for the snippet's inputs.
        before: the node to insert it before.
        like: a node whose position in the model the new nodes take.
    """
    copied: dict[Node, Any] = dict(inputs)
    with graph.inserting_before(before):
        for node in snippet.nodes:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), copied.__getitem__)
            copied[node] = made = graph.create_node(node.op, node.target, args, kwargs)
            made.meta.update(model_position(like))
    return [copied[each] for each in snippet.outputs], [copied[each] for each in snippet.nodes]


def forget_value(node: Node) -> None:
    """Drop from a node's metadata what describes a value that it has no more."""
    for key in VALUE_KEYS:
        node.meta.pop(key, None)


def model_position(node: Node) -> dict[str, Any]:
    """Return the metadata that says where in the model a node is."""
    return {key: node.meta[key] for key in _KEPT if key in node.meta}


def working_copy(module: GraphModule) -> GraphModule:
    """Return a copy of a module for passes to work on: its own graph and tables, the same parameters, no code yet."""
    working: GraphModule = type(module).__new__(type(module))
    type(working).__name__ = type(module).__name__
    working.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "meta"):
        working.__dict__[table] = copy.copy(module.__dict__[table])
    graph = Graph(tracer_cls=module.graph._tracer_cls)
    copied: dict[Node, Node] = {}
    for node in module.graph.nodes:
        # Arguments are set afterwards: `create_node` would search them for symbols, a third of the time.
        copied[node] = made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        made.args = map_arg(node.args, copied.__getitem__)
        if node.kwargs:
            made.kwargs = map_arg(node.kwargs, copied.__getitem__)
        made.meta.update(node.meta)
    graph._codegen = copy.copy(module.graph._codegen)  # a deep copy warns of tree specs, which do not change
    _number(list(graph.nodes))
    graph.owning_module = working
    working.__dict__["_graph"] = graph
    kind: Any = type(working)  # no other module has this class
    kind.forward, kind.__deepcopy__ = _refuse_call, _refuse_copy
    return working


def _refuse_call(module: GraphModule, *_: object, **__: object) -> NoReturn:
    hint = "Run its graph by torch.fx.Interpreter(module).run(...), or call module.recompile() before."
    raise PassError("the module that a pass works on has no code yet", where=type(module).__name__, hint=hint)


def _refuse_copy(module: GraphModule, _: object) -> NoReturn:
    hint = "Change the module itself, or make a torch.fx.GraphModule(module, copy.deepcopy(module.graph))."
    raise PassError("the module that a pass works on is a copy already", where=type(module).__name__, hint=hint)


def _number(nodes: Sequence[Node]) -> None:
    """Give every node its position in the program as captured, which is this graph if no node has a position yet."""
    known = any("order" in node.meta for node in nodes)
    order = program_order(nodes) if known else {node: position for position, node in enumerate(nodes)}
    for node in nodes:
        node.meta["order"] = order[node]


def differs(before: GraphModule, after: GraphModule) -> bool:
    """Return whether two modules would run different code, call other parts, or on different parameters and buffers."""
    if len(before.graph.nodes) != len(after.graph.nodes) or held_tensors(before) != held_tensors(after):
        return True
    if called_modules(before) != called_modules(after):
        return True
    pairs = zip(before.graph.nodes, after.graph.nodes, strict=True)
    return any(_code(one) != _code(other) for one, other in pairs)


def _code(node: Node) -> tuple[object, ...]:
    """Return what a node does, in terms that a copy of it shares."""
    return node.name, node.op, node.target, str(node.args), str(node.kwargs), node.meta.get(BACKEND)


def held_tensors(module: GraphModule) -> dict[str, int]:
    """Return which object each parameter and buffer of a module is, by its path."""
    return {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def called_modules(module: GraphModule) -> dict[str, int]:
    """Return which object each part is that the graph calls, by its path; paths that lead nowhere are left out."""
    paths = {str(node.target): None for node in module.graph.nodes if node.op == "call_module"}
    found = {path: _part(module, path) for path in paths}
    return {path: id(part) for path, part in found.items() if part is not None}


def _part(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


class SharedParts:
    """The parts below a module, which its working copies share with it, as they are before a pass."""

    def __init__(self, module: nn.Module) -> None:
        """Note what each part consists of; the root has tables of its own."""
        self._tables: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        for path, part in local_modules(module):
            if path:
                tables = [part.__dict__[name] for name in TABLES]
                self._tables += [(path, table, dict(table)) for table in tables]

    def restore(self) -> str:
        """Put back what was replaced, added or deleted since, and return the path of the first such; empty if none."""
        first = ""
        for path, table, held in self._tables:
            if list(table) == list(held) and all(table[name] is held[name] for name in held):
                continue
            names = (name for name in {**held, **table} if table.get(name) is not held.get(name))
            first = first or f"{path}.{next(names, '')}"
            table.clear()
            table.update(held)
        return first


def arrange(order: Sequence[Node]) -> None:
    """Relink all nodes of a graph in `order`."""
    previous = order[0]
    for node in order[1:]:
        if previous.next is not node:
            previous.append(node)
        previous = node
