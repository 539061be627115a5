"""Checks that `encode` could have written a received graph, from the message alone, without building torch objects.

For each GraphModule in it, order, names, targets, arguments and metadata of the nodes are checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from fxlib.errors import WireError
from fxlib.runtime.backends import BACKENDS
from fxlib.runtime.ops.registry import BY_LABEL, OPERATORS
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import modules
from fxlib.wire.argument_rules import ArgumentRule, check_arguments, rules_of
from fxlib.wire.check_values import Position, check_sizes, check_value
from fxlib.wire.encode import FORMAT
from fxlib.wire.faults import DEFAULT, Fault, Limits, excess
from fxlib.wire.graphs import check_hint
from fxlib.wire.guards import check_guards
from fxlib.wire.memory_safety import WAY_OUT, reason
from fxlib.wire.modules import Slots, check_data_parallel, check_names
from fxlib.wire.names import (
    DTYPES,
    check_atom,
    check_comment,
    check_device,
    check_label,
    check_name,
    check_node_name,
    check_parameter,
    check_remote_function,
    is_name,
)
from fxlib.wire.remote_functions import check_client, check_contract
from fxlib.wire.targets import METHODS_WITHHELD, candidates, check_operator, functions, methods
from fxlib.wire.tensors import contiguous_strides

T = TypeVar("T")
_CALLS_OF_A_CHILD = {"TripletMarginWithDistanceLoss": 3}
"""Modules of torch.nn that call a module they hold more than once."""

_KINDS: dict[int, frozenset[str]] = {
    pb.OPCODE_PLACEHOLDER: frozenset({"path"}),
    pb.OPCODE_GET_ATTR: frozenset({"path"}),
    pb.OPCODE_CALL_MODULE: frozenset({"path"}),
    pb.OPCODE_OUTPUT: frozenset({"path"}),
    pb.OPCODE_CALL_FUNCTION: frozenset({"function", "operator", "opaque_function"}),
    pb.OPCODE_CALL_METHOD: frozenset({"method", "opaque_method"}),
}
_TORCH = {"function": "", "operator": "", "method": "torch.Tensor."}
"""Prefix of targets under which to find the rules for their arguments."""
_COMPUTED = frozenset({pb.OPCODE_GET_ATTR, pb.OPCODE_CALL_FUNCTION, pb.OPCODE_CALL_METHOD, pb.OPCODE_CALL_MODULE})
"""The nodes that a backend can compute."""
_VERSION = re.compile(r"[0-9A-Za-z.+!_-]{1,60}")
_LONGEST_PATH = 10_000
_RESOLVE = "fxlib.runtime.functions.resolve"
_BATCHED_CALL = ("text", "tuple", "dict")
"""Kinds of the values of one call in a batch: the function's name, its arguments, its keyword arguments."""
# The arguments sent to the remote function come after its name.
_SENT = {
    each.label: (each.function_at + 1, each.function_at + 2)
    for each in OPERATORS
    if each.function_at is not None and each.destination_at is not None
}


def validate(graph: pb.Graph, limits: Limits = DEFAULT) -> None:
    """Check that a graph is well-formed, within the limits, and names nothing that is not allowed.

    Raises:
        LimitError: the graph exceeds a limit.
        WireError: the graph is malformed; the message names the module, the node and the field.
    """
    if graph.format != FORMAT:
        hint = "Update fxlib on this side." if graph.format > FORMAT else "Check that fxlib wrote it."
        raise WireError(f"version {graph.format}; this side reads version {FORMAT}", where="graph.format", hint=hint)
    _each("graph", [graph], lambda whole: _check_size(whole, limits))
    _each("storages", [graph], lambda whole: _check_storages(whole, limits))
    _each("tensors", graph.tensors, lambda tensor: _check_tensor(tensor, graph, limits))
    _each("targets", graph.targets, _check_target)
    _each("contracts", graph.contracts, lambda contract: check_contract(contract, limits))
    _each("clients", graph.clients, lambda client: check_client(client, limits))
    _each("texts", graph.texts, lambda text: check_comment(text, limits))
    _each("modules", graph.modules, lambda module: _check_module(module, graph, limits))
    _each("graph", [graph], lambda whole: _check_tree(whole, limits))
    _check_bodies(graph, limits)


def _each(where: str, items: Iterable[T], check: Callable[[T], None]) -> None:
    for index, item in enumerate(items):
        try:
            check(item)
        except Fault as fault:
            raise fault.at(f"{where}[{index}]" if where.endswith("s") else where) from None


def _check_size(graph: pb.Graph, limits: Limits) -> None:
    size, nodes = graph.ByteSize(), sum(len(module.graph.nodes) for module in graph.modules)
    if size > limits.graph_bytes:
        raise excess("bytes of a graph", size, limits.graph_bytes, "graph_bytes")
    if nodes > limits.nodes:
        raise excess("nodes", nodes, limits.nodes, "nodes")
    # Each entry of these tables was written because a node refers to it.
    for what in ("clients", "contracts", "targets"):
        if (count := len(getattr(graph, what))) > nodes > 0:
            raise Fault(f"{count:,} {what} for {nodes:,} nodes")


def _check_tree(graph: pb.Graph, limits: Limits) -> None:
    """Check that children come before their parents, so there is no cycle; a shared one counts once per path."""
    if not graph.modules or graph.modules[-1].WhichOneof("kind") != "graph":
        raise Fault("the last module is not a GraphModule")
    paths: list[int] = []
    depths: list[int] = []
    for index, module in enumerate(graph.modules):
        below = [slot.module for slot in module.children if slot.HasField("module")]
        if max(below, default=-1) >= index:
            raise Fault(f"modules[{index}] holds a module that does not come before it")
        paths.append(1 + sum(paths[child] for child in below))
        depths.append(1 + max((depths[child] for child in below), default=-1))
        if depths[-1] > limits.nesting:
            raise excess("nesting of modules", depths[-1], limits.nesting, "nesting")
        if paths[-1] > limits.modules:
            raise excess("modules", paths[-1], limits.modules, "modules")


def _check_bodies(graph: pb.Graph, limits: Limits) -> None:
    """Check the nodes of each GraphModule and the number of steps of a forward, which nested calls can multiply."""
    slots = Slots(graph)
    steps: list[int] = []
    for index, module in enumerate(graph.modules):
        if module.WhichOneof("kind") == "graph":
            checker = _BodyChecker(graph, index, slots, limits)
            checker.check()
            called = checker.called
        else:
            called = [slot.module for slot in module.children if slot.HasField("module")]
            called *= _CALLS_OF_A_CHILD.get(module.leaf, 1)
        steps.append(1 + len(module.graph.nodes) + sum(steps[each] for each in called))
        if steps[-1] > limits.steps:
            raise excess("steps of a forward", steps[-1], limits.steps, "steps").at(f"modules[{index}]")


def _check_module(module: pb.Module, graph: pb.Graph, limits: Limits) -> None:
    kind = module.WhichOneof("kind")
    if kind is None:
        raise Fault("is empty, or of a kind that this version does not know")
    if kind == "leaf" and module.leaf not in modules.classes():
        raise Fault(f"{module.leaf[:80]!r} is not a class of torch.nn that can be rebuilt")
    if kind == "opaque":
        check_label(module.opaque)
    if kind == "parallel":
        check_data_parallel(module, limits)
    if kind == "graph":
        check_name(module.graph.class_name, "class")
    check_names(module)
    for slot in (*module.parameters, *module.buffers):
        if slot.HasField("tensor") and slot.tensor >= len(graph.tensors):
            raise Fault(f"{slot.name!r} refers to tensor {slot.tensor}, of {len(graph.tensors)}")
    for slot in module.parameters:
        if slot.HasField("tensor") and not graph.tensors[slot.tensor].parameter:
            raise Fault(f"{slot.name!r} is not a parameter")
    for attribute in module.attributes:
        functions = modules.functions_of(module.leaf, attribute.name)
        position = Position(limits=limits, kind="attribute", tensors=len(graph.tensors), functions=functions)
        check_value(attribute.value, position)
        if kind == "leaf" and attribute.value.WhichOneof("kind") in {"opaque", "handle"}:
            raise Fault(f"attribute {attribute.name!r} of a torch.nn module is opaque")


_SHA256 = re.compile(r"[0-9a-f]{64}")
_NO_STRIDED = ("bits", "qint", "quint")
"""Dtypes of quantized tensors, and other dtypes without a strided form."""
_HEADER_BYTES = 1024
"""The bytes that a blob may have besides those of its storage: the header of safetensors, of about a hundred."""


def _check_storages(graph: pb.Graph, limits: Limits) -> None:
    """Raise Fault unless all storages together are within the limits, and their blobs are named by digests."""
    total = 0
    for storage in graph.storages:
        if storage.bytes < 0:
            raise Fault(f"negative size {storage.bytes}")
        total += storage.bytes
        if storage.device:
            check_device(storage.device)
        if storage.HasField("data") and (_SHA256.fullmatch(storage.data.sha256) is None or storage.data.size < 0):
            raise Fault(f"{storage.data.sha256[:80]!r} is not the SHA-256 of a blob")
        if storage.data.size > storage.bytes + _HEADER_BYTES:
            raise Fault(f"a blob of {storage.data.size:,} bytes for a storage of {storage.bytes:,}")
    if total > limits.weights_bytes:
        raise excess("bytes of all weights", total, limits.weights_bytes, "weights_bytes")


def _check_tensor(tensor: pb.Tensor, graph: pb.Graph, limits: Limits) -> None:
    """Raise Fault unless a tensor lies within its storage."""
    if tensor.storage >= len(graph.storages):
        raise Fault(f"refers to storage {tensor.storage}, of {len(graph.storages)}")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or tensor.dtype.startswith(_NO_STRIDED):
        raise Fault(f"unknown dtype {tensor.dtype[:80]!r}")
    if tensor.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise Fault(f"a tensor of dtype {tensor.dtype} cannot take a gradient")
    elements = check_sizes(tensor.shape, limits)
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride) or contiguous_strides(shape)
    if len(strides) != len(shape) or min(strides, default=0) < 0 or tensor.offset < 0:
        raise Fault("strides or offset do not fit the shape")
    if any(step * max(size, 1) >= 1 << 62 for size, step in zip(shape, strides, strict=True)):
        raise Fault("strides exceed the address space")
    last = tensor.offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if (elements and (last + 1) * dtype.itemsize > graph.storages[tensor.storage].bytes) or tensor.offset >= 1 << 62:
        raise Fault(f"reaches beyond the {graph.storages[tensor.storage].bytes:,} bytes of its storage")


def _check_target(target: pb.Target) -> None:
    """Raise Fault unless a function, operator or method is on its allow-list."""
    kind = target.WhichOneof("kind")
    if kind == "function" and target.function not in functions():
        raise _refusal("function", target.function, target.function)
    if kind == "path" and len(target.path) > _LONGEST_PATH:
        raise Fault(f"a path of {len(target.path):,} characters is too long", f"{_LONGEST_PATH:,} are allowed.")
    if kind == "operator":
        check_operator(target.operator)
    elif kind == "method" and target.method not in methods():
        raise _refusal("method", target.method, f"torch.Tensor.{target.method}")
    elif kind == "opaque_function":
        check_label(target.opaque_function)
    elif kind == "opaque_method":
        check_name(target.opaque_method, "method")
    elif kind is None:
        raise Fault("is empty, or of a kind that this version does not know")


def _rules_of_target(kind: str, target: str) -> tuple[tuple[ArgumentRule, ...], bool]:
    """Return the rules for the arguments of a target, and whether they apply to arguments without a keyword."""
    rules = rules_of(_TORCH[kind] + target) if kind in _TORCH else ()
    return rules, any(rule.positions for rule in rules)


def _refusal(what: str, name: str, spelled: str) -> Fault:
    if spelled not in candidates():
        return Fault(f"{what} {name[:80]!r} is not on the allow-list")
    return Fault(f"{what} {name[:80]!r} may not travel: {reason(spelled)}", WAY_OUT)


class _BodyChecker:
    """Checks the nodes of `graph.modules[module]`, once the modules themselves have been checked.

    If a value could be called, a graph could call anything, by an attribute or a method whose name it chooses itself.
    Therefore modules and functions are not values, except as arguments of the client's own code.
    """

    def __init__(self, graph: pb.Graph, module: int, slots: Slots, limits: Limits) -> None:
        self.called: list[int] = []
        """Indices of the modules that the nodes call, once for each call."""
        self._graph = graph
        self._module = module
        self._body = graph.modules[module].graph
        self._slots = slots
        self._limits = limits
        self._modules: set[int] = set()
        self._functions: set[int] = set()
        self._held: set[int] = set()
        self._batches: dict[int, int] = {}
        self._targets = [
            (str(kind), getattr(each, kind)) for each in graph.targets if (kind := each.WhichOneof("kind"))
        ]
        self._rules = [_rules_of_target(kind, target) for kind, target in self._targets]
        self._names: set[str] = set()
        self._parameters: set[str] = set()
        self._paths: dict[str, int | None] = {}
        self._keywords: set[str] = set()
        self._field = ""

    def check(self) -> None:
        """Check the body.

        Raises:
            WireError: the body is malformed; the message names the node and the field.
        """
        try:
            if self._body.HasField("pytree"):
                _check_pytree(self._body.pytree, self._limits)
        except Fault as fault:
            raise fault.at("graph, pytree") from None
        for index, node in enumerate(self._body.nodes):
            try:
                self._check_node(index, node)
            except Fault as fault:
                where = f"node {node.name[:80]!r} ({index})"
                raise fault.at(f"{where}, {self._field}" if self._field else where) from None
        if not self._body.nodes or self._body.nodes[-1].op != pb.OPCODE_OUTPUT:
            raise Fault("its last node is not its output").at("graph")

    def _check_node(self, index: int, node: pb.Node) -> None:
        self._field = ""
        check_node_name(node.name)
        if node.name in self._names:
            raise Fault("two nodes have one name")
        self._names.add(node.name)
        self._field = "target"
        if node.target >= len(self._targets):
            raise Fault(f"refers to target {node.target}, of {len(self._targets)}")
        kind, target = self._targets[node.target]
        if kind not in _KINDS.get(node.op, ()):
            raise Fault(f"a {kind} does not go with opcode {node.op}")
        # A callable of the client's may have the name of one of our operators without being it.
        if node.op != pb.OPCODE_CALL_FUNCTION or kind == "function":
            _SHAPES[node.op](self, index, node, target)
        rules, positional = self._rules[node.target]
        if rules and (positional or node.kwargs):
            self._field = ""
            check_arguments(rules, target, node)
        self._check_arguments(index, node, kind, target)
        if node.HasField("type"):
            self._field = "type"
            check_hint(node.type, self._limits)
        self._check_meta(node)

    def _check_arguments(self, index: int, node: pb.Node, kind: str, target: str) -> None:
        held = self._functions if kind == "opaque_function" else self._held
        position = Position(limits=self._limits, nodes=0 if node.op == pb.OPCODE_PLACEHOLDER else index, withheld=held)
        sent = _SENT.get(target, ()) if kind == "function" and self._functions else ()
        for number, arg in enumerate(node.args):
            try:
                check_value(arg, replace(position, withheld=self._modules) if number in sent else position)
            except Fault:
                self._field = f"args[{number}]"
                raise
        if len(node.kwargs) > 1 and len({each.name for each in node.kwargs}) != len(node.kwargs):
            raise Fault("two keyword arguments have one name")
        for each in node.kwargs:
            self._field = "kwargs"
            if each.name not in self._keywords:
                check_name(each.name, "keyword")
                self._keywords.add(each.name)
            self._field = each.name
            check_value(each.value, position)

    def _check_meta(self, node: pb.Node) -> None:
        if node.call:
            self._field = "call"
            check_comment(node.call, self._limits)
        for field, table in (
            ("contract", self._graph.contracts),
            ("source", self._graph.texts),
            ("stack_trace", self._graph.texts),
        ):
            if node.HasField(field) and getattr(node, field) >= len(table):
                self._field = field
                raise Fault(f"refers to entry {getattr(node, field)}, of {len(table)}")
        if node.folded:
            self._field = "folded"
            if node.op != pb.OPCODE_GET_ATTR:
                raise Fault("only a value that the module holds was computed from weights")
            for step in dict.fromkeys(step for name in node.folded for step in name.split(".")):
                check_atom(step, "step of a path")
        if node.backend:
            self._field = "backend"
            name, _, version = node.backend.partition("==")
            if name not in BACKENDS or not _VERSION.fullmatch(version) or node.op not in _COMPUTED:
                raise Fault(f"{node.backend[:80]!r} is not a backend that this version knows for such a node")
        if node.HasField("tensor_meta"):
            self._field = "tensor_meta"
            check_value(node.tensor_meta, Position(limits=self._limits, kind="tensor_meta"))

    def _placeholder(self, index: int, node: pb.Node, target: str) -> None:
        check_parameter(target)
        if target in self._parameters:
            raise Fault(f"two placeholders are called {target!r}")
        self._parameters.add(target)
        if len(node.args) > 1 or node.kwargs:
            raise Fault("a placeholder has one argument, its default, or none")

    def _get_attr(self, index: int, node: pb.Node, target: str) -> None:
        if self._find(target) is not None:
            self._modules.add(index)
            self._held.add(index)
        if node.args or node.kwargs:
            raise Fault("a get_attr node has no arguments")

    def _call_module(self, index: int, node: pb.Node, target: str) -> None:
        module = self._find(target)
        if module is None:
            raise Fault(f"there is no module {target[:200]!r}")
        self.called.append(module)

    def _call_method(self, index: int, node: pb.Node, target: str) -> None:
        if not node.args or node.args[0].WhichOneof("kind") != "node":
            raise Fault("the first argument of a method is the node on which it is called")

    def _call_function(self, index: int, node: pb.Node, target: str) -> None:
        if target == "builtins.getattr":
            self._check_getattr(node)
        elif target.startswith("builtins.") and any(each.name == "key" for each in node.kwargs):
            raise Fault(f"{target} may not take a key function")
        elif (operator := BY_LABEL.get(target)) is not None and operator.arguments is not None:
            if target == _RESOLVE:
                self._functions.add(index)
                self._held.add(index)
            count, named = operator.arguments, operator.function_at
            if len(node.args) != count or node.kwargs:
                raise Fault(f"{target} takes {count} positional arguments")
            if named is not None:
                self._field = f"args[{named}]"
                check_remote_function(node.args[named].text)
            if operator.calls_at is not None:
                self._batches[index] = self._check_batch(node, operator.calls_at, operator.batched_by_at)
            elif operator.item_at is not None:
                self._check_item(node, operator.item_at)

    def _check_batch(self, node: pb.Node, calls_at: int, batched_by_at: int | None) -> int:
        self._field = f"args[{calls_at}]"
        calls = node.args[calls_at].tuple.items
        if not calls:
            raise Fault("a batch is a tuple of calls, at least one")
        for call in calls:
            parts = call.tuple.items
            if tuple(part.WhichOneof("kind") for part in parts) != _BATCHED_CALL:
                raise Fault("a call of a batch is a tuple of a function's name, a tuple and a dict")
            _check_function(parts[0].text)
        if batched_by_at is not None:
            self._field = f"args[{batched_by_at}]"
            if node.args[batched_by_at].WhichOneof("kind") != "none":
                _check_function(node.args[batched_by_at].text)
        return len(calls)

    def _check_item(self, node: pb.Node, item_at: int) -> None:
        batch, index = node.args[0], node.args[item_at]
        count = self._batches.get(batch.node, 0) if batch.WhichOneof("kind") == "node" else 0
        if index.WhichOneof("kind") != "integer" or not 0 <= index.integer < count:
            raise Fault("does not wait for a call of a batch that was issued")

    def _check_getattr(self, node: pb.Node) -> None:
        if len(node.args) not in (2, 3) or node.kwargs or node.args[0].WhichOneof("kind") != "node":
            raise Fault("getattr takes a node, a name, and perhaps a default")
        name = node.args[1].text
        if not is_name(name) or name.startswith("_") or name in METHODS_WITHHELD:
            self._field = "args[1]"
            raise Fault(f"attribute {name[:80]!r} may not be read")

    def _output(self, index: int, node: pb.Node, target: str) -> None:
        if target != "output" or len(node.args) != 1 or node.kwargs or index != len(self._body.nodes) - 1:
            raise Fault("the output is the last node, called 'output', with one argument")

    def _find(self, path: str) -> int | None:
        """Return the module at a path, each step of which is a slot in the message: no attribute is ever walked."""
        if path not in self._paths:
            self._paths[path] = self._slots.find(self._module, path)
        return self._paths[path]


def _check_function(name: str) -> None:
    check_remote_function(name)
    if name.startswith("."):
        raise Fault(f"{name[:80]!r} is a method, and a batch only calls functions")


_SHAPES: dict[int, Callable[[_BodyChecker, int, pb.Node, str], None]] = {
    pb.OPCODE_PLACEHOLDER: _BodyChecker._placeholder,
    pb.OPCODE_GET_ATTR: _BodyChecker._get_attr,
    pb.OPCODE_CALL_FUNCTION: _BodyChecker._call_function,
    pb.OPCODE_CALL_METHOD: _BodyChecker._call_method,
    pb.OPCODE_CALL_MODULE: _BodyChecker._call_module,
    pb.OPCODE_OUTPUT: _BodyChecker._output,
}


def _check_pytree(tree: pb.Pytree, limits: Limits) -> None:
    """Raise Fault unless the structures are well-formed, and their guards and names are those of their parts."""
    for number, name in enumerate(tree.arguments):
        if number or name != "self":
            check_name(name, "argument")
    position = Position(limits=limits, kind="structure")
    check_value(tree.inputs, position)
    if tree.HasField("outputs"):
        check_value(tree.outputs, position)
    # Code generation writes the names of keyword arguments between quotes without escaping them.
    parts = tree.inputs.tuple.items
    if len(parts) == 2 and parts[1].WhichOneof("kind") == "dict":
        for entry in parts[1].dict.items:
            check_name(entry.key.text, "keyword argument")
    if tree.HasField("guards"):
        check_guards(tree.guards, _leaves(tree.inputs), limits)
        if [part.WhichOneof("kind") for part in parts] != ["tuple", "dict"]:
            raise Fault("the guarded arguments are not (args, kwargs)")
        if len(tree.arguments) != len(parts[0].tuple.items) + len(parts[1].dict.items):
            raise Fault("the guarded arguments have other names than parts")
        if not set(tree.guards.ordered) <= {entry.key.text for entry in parts[1].dict.items}:
            raise Fault("the guards are about the order of arguments that are not there")


def _leaves(structure: pb.Value) -> int:
    """Return how many leaves a checked structure has."""
    kind = str(structure.WhichOneof("kind"))
    if kind == "none":
        return 1
    items = getattr(structure, kind).items
    return sum(_leaves(each.value if "dict" in kind else each) for each in items)
