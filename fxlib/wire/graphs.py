"""Writes the nodes of one GraphModule to the wire format, and reads them once they have been checked.

Simple type annotations travel; others are left out.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, _PyTreeCodeGen, _PyTreeInfo

from fxlib.errors import WireError
from fxlib.runtime.attributes import read_attribute
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.guards.folded_weights import FOLDED, RANK
from fxlib.runtime.lowering import BACKEND
from fxlib.runtime.ops.calls import Client, ClientFunction, client_of, kinds, signature_of
from fxlib.spec.contract import Contract
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.callables import Labels, known_name
from fxlib.wire.faults import DEFAULT, Fault, Limits, excess
from fxlib.wire.guards import read_guards, write_guards
from fxlib.wire.names import as_name, check_comment, check_node_name, clean_comment
from fxlib.wire.opaque import OpaqueFunction
from fxlib.wire.remote_functions import functions_of, read_client, read_contract, write_client, write_contract
from fxlib.wire.structures import OwnContainer, read_spec, write_spec
from fxlib.wire.targets import DATA_ATTRIBUTES, find_operator, functions, methods, registered
from fxlib.wire.values import ValueReader, ValueWriter, write_tensor_meta

OPCODES = {
    "placeholder": pb.OPCODE_PLACEHOLDER,
    "get_attr": pb.OPCODE_GET_ATTR,
    "call_function": pb.OPCODE_CALL_FUNCTION,
    "call_method": pb.OPCODE_CALL_METHOD,
    "call_module": pb.OPCODE_CALL_MODULE,
    "output": pb.OPCODE_OUTPUT,
}
_MOST_PARTS = 256
"""Maximum number of classes in one annotation; Python compares each part of a union with all others."""
_WAITS = 2
"""Index, among a client's functions, of the one that waits, which takes the result of the issue."""

_Target = str | Callable[..., Any]
_PLAIN: dict[str, Any] = {
    **{cls.__name__: cls for cls in (bool, bytes, complex, dict, float, int, list, object, str, tuple)},
    **{f"torch.{cls.__name__}": cls for cls in (torch.Tensor, torch.Size, torch.device, torch.dtype)},
    **{name: getattr(torch, name) for name in ("SymInt", "SymFloat", "SymBool")},
    "torch.futures.Future": torch.futures.Future,
    "None": type(None),
    "...": ...,
    "typing.Any": typing.Any,
}
_GENERIC: dict[str, Any] = {
    **{cls.__name__: cls for cls in (dict, list, tuple)},
    "typing.Dict": typing.Dict,  # noqa: UP006 - not the same annotation as dict
    "typing.List": typing.List,  # noqa: UP006
    "typing.Sequence": typing.Sequence,
    "typing.Tuple": typing.Tuple,  # noqa: UP006
    "typing.Union": typing.Union,
}
_UNION = "|"
_NAMES = {id(value): name for name, value in _PLAIN.items()}
_ALIASES = {
    _GENERIC[name].__origin__: name for name in _GENERIC if name.startswith("typing.") and name != "typing.Union"
}


class Tables:
    """The tables that the bodies of one graph share: targets, contracts and texts, each written once."""

    def __init__(self, graph: pb.Graph, labels: Labels) -> None:
        self._graph = graph
        self._labels = labels
        self._targets: dict[object, int] = {}
        self._contracts: dict[bytes, int] = {}
        self._texts: dict[str, int] = {}
        self._clients: set[Client] = set()

    def target(self, node: Node) -> int:
        """Return the index of the node's target."""
        called = getattr if node.target is read_attribute else node.target
        key = id(called) if node.op == "call_function" else (node.op == "call_method", called)
        index = self._targets.get(key)
        if index is None:
            index = self._targets[key] = len(self._graph.targets)
            kind, name = self._name(node)
            self._graph.targets.add(**{kind: name})
            if (client := client_of(node)) is not None:
                self._add_client(Client.of(client))
        return index

    def contract(self, contract: Contract) -> int:
        """Return the index of a contract."""
        message = write_contract(contract)
        key = message.SerializeToString(deterministic=True)
        index = self._contracts.get(key)
        if index is None:
            index = self._contracts[key] = len(self._graph.contracts)
            self._graph.contracts.append(message)
        return index

    def text(self, text: str) -> int:
        """Return the index of a stack trace or source position."""
        index = self._texts.get(text)
        if index is None:
            index = self._texts[text] = len(self._graph.texts)
            self._graph.texts.append(clean_comment(text))
        return index

    def _add_client(self, client: Client) -> None:
        if client not in self._clients:
            self._clients.add(client)
            write_client(self._graph.clients.add(), client)

    def _name(self, node: Node) -> tuple[str, str]:
        target: Any = node.target
        if node.op == "call_method":
            return ("method" if target in methods() else "opaque_method"), target
        if node.op != "call_function":
            return "path", target
        if isinstance(target, OpaqueFunction):
            return ("opaque_method" if target.method else "opaque_function"), target.slot
        return known_name(target) or ("opaque_function", self._labels.label(target))


def write_body(body: pb.Body, module: GraphModule, tables: Tables) -> None:
    """Write the nodes of a GraphModule, and how its forward packs arguments and results.

    Raises:
        WireError: something in it cannot travel; the message names the node and the field.
    """
    body.class_name = as_name(type(module).__name__)
    _write_codegen(body, module.graph._codegen)
    nodes: dict[Node, int] = {}
    values = ValueWriter(nodes)
    meta_values = ValueWriter(special=write_tensor_meta)
    for index, node in enumerate(module.graph.nodes):
        message = body.nodes.add()
        try:
            _write_node(message, node, tables, values)
            _write_meta(message, node.meta, tables, meta_values)
        except Fault as fault:
            raise fault.at(f"node {node.name!r}{_field_of(node, nodes, fault)}") from None
        nodes[node] = index


def _write_node(message: pb.Node, node: Node, tables: Tables, values: ValueWriter) -> None:
    check_node_name(node.name)
    opaque_method = isinstance(node.target, OpaqueFunction) and node.target.method
    message.op = pb.OPCODE_CALL_METHOD if opaque_method else OPCODES[node.op]
    message.name = node.name
    message.target = tables.target(node)
    args = message.args
    for arg in node.args:
        values.write(args.add(), arg)
    for name, arg in node.kwargs.items():
        values.write(message.kwargs.add(name=name).value, arg)
    if node.type is not None and not (_write_hint(message.type, node.type) and _parts(message.type) <= _MOST_PARTS):
        message.ClearField("type")


def _field_of(node: Node, nodes: dict[Node, int], fault: Fault) -> str:
    """Find out in which argument the fault lies, after the fact: writing does not keep track of it."""
    fields = [(f", args[{index}]", arg) for index, arg in enumerate(node.args)]
    fields += [(f", kwargs[{name!r}]", arg) for name, arg in node.kwargs.items()]
    for field, arg in fields:
        try:
            ValueWriter(nodes).write(pb.Value(), arg)
        except Fault as found:
            if found.message == fault.message:
                return field
    return ""


def _write_meta(message: pb.Node, meta: dict[str, Any], tables: Tables, values: ValueWriter) -> None:
    # A key of ours with a value of another type is not ours.
    if isinstance(call := meta.get("call"), str):
        check_comment(call, DEFAULT)
        message.call = call
    if isinstance(contract := meta.get("contract"), Contract):
        message.contract = tables.contract(contract)
    if type(order := meta.get("order")) is int:
        message.order = order
    if type(requires_grad := meta.get("requires_grad")) is bool:
        message.requires_grad = requires_grad
    if isinstance(source := meta.get("source"), str):
        message.source = tables.text(source)
    if isinstance(stack_trace := meta.get("stack_trace"), str):
        message.stack_trace = tables.text(stack_trace)
    message.folded.extend(meta.get(FOLDED, ()))
    if type(rank := meta.get(RANK)) is int:
        message.rank = rank
    if isinstance(backend := meta.get(BACKEND), str):
        message.backend = backend
    if "tensor_meta" in meta:
        try:
            values.write(message.tensor_meta, meta["tensor_meta"])
        except Fault:  # a symbolic shape, or a value from another tool: facts that can be recomputed
            message.ClearField("tensor_meta")


def _write_codegen(body: pb.Body, codegen: CodeGen) -> None:
    if type(codegen) is CodeGen:
        return
    where = "graph, codegen"
    if type(codegen) not in (_PyTreeCodeGen, GuardedCodeGen):
        raise WireError(
            f"a {type(codegen).__name__} cannot travel", where=where, hint="Only plain and pytree code generation can."
        )
    info: Any = codegen.pytree_info  # type: ignore[attr-defined]
    body.pytree.arguments.extend(info.orig_args)
    try:
        write_spec(body.pytree.inputs, info.in_spec)
        if info.out_spec is not None:
            write_spec(body.pytree.outputs, info.out_spec)
        if isinstance(codegen, GuardedCodeGen):
            write_guards(body.pytree.guards, codegen.guards)
    except Fault as fault:
        raise fault.at(where) from None


_OPS = {number: name for name, number in OPCODES.items()}


class GraphReader:
    """Builds the graphs of a checked message.

    Args:
        graph: the message.
        values: reads arguments.
        own: callables of the client's module; None if there is no client.
        more: other callables that fill opaque slots, by label.
        containers: the client's classes of containers, by label; None if there is no client.
    """

    def __init__(
        self,
        graph: pb.Graph,
        values: ValueReader,
        own: Labels | None,
        more: Mapping[str, Callable[..., Any]],
        containers: Mapping[str, OwnContainer] | None,
    ) -> None:
        self._values = values
        self._containers = containers
        self._contracts: list[Contract] = [read_contract(each) for each in graph.contracts]
        self._texts = list(graph.texts)
        callables = {**registered(), **(own.functions if own is not None else {}), **more}
        if own is None:
            described = [functions_of(read_client(each)) for each in graph.clients]
            callables = {label: each for functions in described for label, each in functions.items()} | callables
        self._targets = [_target(each, callables, own) for each in graph.targets]
        self._signatures = {
            index: signature for index, each in enumerate(self._targets) if (signature := _signature(each)) is not None
        }

    def read(self, body: pb.Body) -> Graph:
        """Return the graph of a body.

        Raises:
            WireError: torch.fx refuses a node.
        """
        graph = Graph()
        nodes: list[Node] = []
        values = self._values.with_nodes(nodes)
        for message in body.nodes:
            try:
                node = self._node(graph, message, values)
                self._read_meta(node, message)
            except (Fault, ValueError, TypeError, AssertionError) as error:
                fault = error if isinstance(error, Fault) else Fault(f"torch.fx refuses it: {error}")
                raise fault.at(f"node {message.name!r}") from None
            nodes.append(node)
        if body.HasField("pytree"):
            graph.set_codegen(self._codegen(body.pytree))
        return graph

    def _node(self, graph: Graph, message: pb.Node, values: ValueReader) -> Node:
        target = self._targets[message.target]
        op = _OPS[message.op]
        if op == "call_method" and not isinstance(target, str):
            op = "call_function"  # on a stand-in, which hides the method's name
        elif target is getattr and message.args[1].text not in DATA_ATTRIBUTES:
            target = read_attribute
        args = tuple([values.read(arg) for arg in message.args])
        kwargs = {each.name: values.read(each.value) for each in message.kwargs}
        if (signature := self._signatures.get(message.target)) is not None:
            _check_fit(signature, args, kwargs)
        hint = _read_hint(message.type) if message.HasField("type") else None
        node = graph.create_node(op, target, args, kwargs, message.name, hint)
        if node.name != message.name:  # a name that torch.fx would not have chosen, such as that of a builtin
            graph._graph_namespace._rename_object(node, message.name)
            node.name = message.name
        return node

    def _read_meta(self, node: Node, message: pb.Node) -> None:
        meta = node.meta
        if message.call:
            meta["call"] = message.call
        if message.HasField("contract"):
            meta["contract"] = self._contracts[message.contract]
        if message.HasField("order"):
            meta["order"] = message.order
        if message.HasField("requires_grad"):
            meta["requires_grad"] = message.requires_grad
        if message.HasField("source"):
            meta["source"] = self._texts[message.source]
        if message.HasField("stack_trace"):
            meta["stack_trace"] = self._texts[message.stack_trace]
        if message.folded:
            meta[FOLDED] = tuple(message.folded)
        if message.HasField("rank"):
            meta[RANK] = message.rank
        if message.backend:
            meta[BACKEND] = message.backend
        if message.HasField("tensor_meta"):
            meta["tensor_meta"] = self._values.read(message.tensor_meta)

    def _codegen(self, tree: pb.Pytree) -> _PyTreeCodeGen:
        try:
            inputs = read_spec(tree.inputs, self._values, self._containers)
            has_outputs = tree.HasField("outputs")
            outputs = read_spec(tree.outputs, self._values, self._containers) if has_outputs else None
        except Fault as fault:
            raise fault.at("graph, pytree") from None
        info = _PyTreeInfo(list(tree.arguments), inputs, outputs)
        return GuardedCodeGen(info, read_guards(tree.guards)) if tree.HasField("guards") else _PyTreeCodeGen(info)


def _signature(target: _Target) -> inspect.Signature | None:
    """Return the parameters of a client's function that blocks or issues; None for any other target."""
    if isinstance(target, ClientFunction):
        return None if target.place == _WAITS else target.__signature__
    known = (kind for kind in kinds() if kind.is_client and target in (kind.blocking, kind.issue))
    return next((signature_of(kind.blocking) for kind in known), None)


def _check_fit(signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise Fault unless a call fits the signature of the client's function, which planning binds it to."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise Fault(f"the client's function takes {signature}: {error}") from None


def _target(message: pb.Target, own: Mapping[str, Callable[..., Any]], labels: Labels | None) -> _Target:
    kind = str(message.WhichOneof("kind"))
    name: str = getattr(message, kind)
    if kind == "function":
        return functions()[name]
    if kind == "operator":
        return find_operator(name)
    if kind == "opaque_function":
        if labels is not None and name not in own:
            raise _unbound("function", name)
        return own.get(name) or OpaqueFunction(name)
    if kind == "opaque_method":
        if labels is None:
            return OpaqueFunction(name, method=True)
        if name not in labels.methods and f".{name}" not in own:
            raise _unbound("method", name)
        return own.get(f".{name}", name)  # a stand-in, if `root` was itself decoded without its client
    return name


def _unbound(what: str, name: str) -> WireError:
    hint = "Decode with the module that was captured."
    return WireError(f"the module given as root calls no {what} {name!r}", where="graph.targets", hint=hint)


def _write_hint(hint: pb.TypeHint, annotation: object) -> bool:
    """Write an annotation; False, with the message in an undefined state, if it is not a simple one."""
    if (name := _NAMES.get(id(annotation))) is not None:
        hint.name = name
        return True
    origin = typing.get_origin(annotation)
    if isinstance(annotation, types.UnionType):
        hint.name = _UNION
    elif origin is typing.Union:
        hint.name = "typing.Union"
    elif isinstance(annotation, types.GenericAlias):
        name = annotation.__origin__.__name__
        hint.name = name if _GENERIC.get(name) is origin else ""
    else:
        hint.name = _ALIASES.get(origin, "")
    arguments = typing.get_args(annotation)
    return bool(hint.name and arguments) and all(_write_hint(hint.arguments.add(), each) for each in arguments)


def check_hint(hint: pb.TypeHint, limits: Limits, depth: int = 1) -> None:
    """Raise Fault unless the annotation is one that `_write_hint` can write."""
    if depth > limits.nesting:
        raise excess("nesting of an annotation", depth, limits.nesting, "nesting")
    if depth == 1 and (parts := _parts(hint)) > _MOST_PARTS:
        raise Fault(f"an annotation has {parts:,} parts, and may have {_MOST_PARTS}")
    if hint.name != _UNION and hint.name not in (_GENERIC if hint.arguments else _PLAIN):
        raise Fault(f"unknown annotation {hint.name[:80]!r}")
    if hint.name == _UNION and len(hint.arguments) < 2:
        raise Fault("a union of fewer than two annotations")
    for each in hint.arguments:
        check_hint(each, limits, depth + 1)


def _parts(hint: pb.TypeHint) -> int:
    return 1 + sum(map(_parts, hint.arguments))


def _read_hint(hint: pb.TypeHint) -> Any:
    """Return an annotation that `check_hint` has passed.

    Raises:
        Fault: Python refuses this combination.
    """
    if not hint.arguments:
        return _PLAIN[hint.name]
    arguments = tuple(_read_hint(each) for each in hint.arguments)
    try:
        if hint.name == _UNION:
            result = arguments[0]
            for each in arguments[1:]:
                result = result | each
            return result
        return _GENERIC[hint.name][arguments]
    except TypeError as error:
        raise Fault(f"no such annotation: {error}") from None
