"""The nodes of one GraphModule into the wire format."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen, _PyTreeCodeGen

from fxlib.errors import WireError
from fxlib.runtime.attributes import read_attribute
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.guards.folded_weights import FOLDED, RANK
from fxlib.runtime.lowering import BACKEND
from fxlib.runtime.ops.calls import Client, client_of
from fxlib.spec.contract import Contract
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.callables import Labels, known_name
from fxlib.wire.clients import write_client
from fxlib.wire.contracts import write_contract
from fxlib.wire.faults import Fault
from fxlib.wire.guards import write_guards
from fxlib.wire.hints import write_hint
from fxlib.wire.limits import DEFAULT
from fxlib.wire.names import as_name, check_comment, check_node_name, clean_comment
from fxlib.wire.opaque import OpaqueFunction
from fxlib.wire.structures import write_spec
from fxlib.wire.targets import methods
from fxlib.wire.write_values import ValueWriter, write_tensor_meta

OPCODES = {
    "placeholder": pb.OPCODE_PLACEHOLDER,
    "get_attr": pb.OPCODE_GET_ATTR,
    "call_function": pb.OPCODE_CALL_FUNCTION,
    "call_method": pb.OPCODE_CALL_METHOD,
    "call_module": pb.OPCODE_CALL_MODULE,
    "output": pb.OPCODE_OUTPUT,
}


class Tables:
    """What the bodies of one graph share: targets, contracts and texts, each written once."""

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
        WireError: something in it cannot travel; names the node and the field.
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
    if node.type is not None and not write_hint(message.type, node.type):
        message.ClearField("type")


def _field_of(node: Node, nodes: dict[Node, int], fault: Fault) -> str:
    """Find out, once something is wrong, in which argument: writing does not keep track of it."""
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
    # A key of ours with a value of another type is somebody else's.
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
        except Fault:  # of a symbolic shape, or a value that no tool of ours has made: facts that can be found again
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
