"""The nodes of one GraphModule out of the wire format, once they have been checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from fxlib.errors import WireError
from fxlib.runtime.attributes import read_attribute
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.guards.folded_weights import FOLDED, RANK
from fxlib.runtime.lowering import BACKEND
from fxlib.runtime.ops.calls import ClientFunction, kinds, signature_of
from fxlib.spec.contract import Contract
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.callables import Labels
from fxlib.wire.clients import functions_of, read_client
from fxlib.wire.contracts import read_contract
from fxlib.wire.faults import Fault
from fxlib.wire.guards import read_guards
from fxlib.wire.hints import read_hint
from fxlib.wire.opaque import OpaqueFunction
from fxlib.wire.operators import find_operator
from fxlib.wire.read_values import ValueReader
from fxlib.wire.structures import OwnContainer, read_spec
from fxlib.wire.targets import DATA_ATTRIBUTES, functions, registered
from fxlib.wire.write_graph import OPCODES

_OPS = {number: name for name, number in OPCODES.items()}
_WAITS = 2
"""The place among a client's functions of the one that waits, which takes what the issue returned."""

Target = str | Callable[..., Any]


class GraphReader:
    """Builds the graphs of a checked message.

    Args:
        graph: the message.
        values: reads arguments.
        own: callables of the client's module; None where there is no client.
        more: other callables that fill opaque slots, by label.
        containers: the client's classes of containers, by label; None where there is no client.
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
            op = "call_function"  # on a stand-in, which keeps the method's name to itself
        elif target is getattr and message.args[1].text not in DATA_ATTRIBUTES:
            target = read_attribute
        args = tuple([values.read(arg) for arg in message.args])
        kwargs = {each.name: values.read(each.value) for each in message.kwargs}
        if (signature := self._signatures.get(message.target)) is not None:
            _check_fit(signature, args, kwargs)
        hint = read_hint(message.type) if message.HasField("type") else None
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


def _signature(target: Target) -> inspect.Signature | None:
    """Return the parameters of a client's function that blocks or issues; None for any other target."""
    if isinstance(target, ClientFunction):
        return None if target.place == _WAITS else target.__signature__
    known = (kind for kind in kinds() if kind.is_client and target in (kind.blocking, kind.issue))
    return next((signature_of(kind.blocking) for kind in known), None)


def _check_fit(signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise Fault unless a call of a client's function gives what it takes: whatever plans by the call binds it."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise Fault(f"the client's function takes {signature}: {error}") from None


def _target(message: pb.Target, own: Mapping[str, Callable[..., Any]], labels: Labels | None) -> Target:
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
        return own.get(f".{name}", name)  # a stand-in where `root` was itself decoded without its client
    return name


def _unbound(what: str, name: str) -> WireError:
    hint = "Decode with the module that was captured."
    return WireError(f"the module given as root calls no {what} {name!r}", where="graph.targets", hint=hint)
