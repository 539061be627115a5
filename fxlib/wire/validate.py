"""Is a received graph one that `encode` could have written? Checked on the message alone; no torch object is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from fxlib.errors import WireError
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import leaves
from fxlib.wire.check_graph import BodyChecker, check_target
from fxlib.wire.check_tensors import check_storages, check_tensor
from fxlib.wire.check_values import Place, check_value
from fxlib.wire.clients import check_client
from fxlib.wire.contracts import check_contract
from fxlib.wire.data_parallel import check_data_parallel
from fxlib.wire.encode import FORMAT
from fxlib.wire.faults import Fault, excess
from fxlib.wire.limits import DEFAULT, Limits
from fxlib.wire.names import check_comment, check_label, check_name
from fxlib.wire.slots import Slots, check_names

T = TypeVar("T")
_CALLS_OF_A_CHILD = {"TripletMarginWithDistanceLoss": 3}
"""Modules of torch.nn that call what they hold more than once."""


def validate(graph: pb.Graph, limits: Limits = DEFAULT) -> None:
    """Check that a graph is well-formed, within the limits, and names nothing that is not allowed.

    Raises:
        LimitError: it exceeds a limit.
        WireError: it is malformed; names the module, the node and the field.
    """
    if graph.format != FORMAT:
        hint = "Update fxlib on this side." if graph.format > FORMAT else "Was it written by fxlib?"
        raise WireError(f"version {graph.format}; this side reads version {FORMAT}", where="graph.format", hint=hint)
    _each("graph", [graph], lambda whole: _check_size(whole, limits))
    _each("storages", [graph], lambda whole: check_storages(whole, limits))
    _each("tensors", graph.tensors, lambda tensor: check_tensor(tensor, graph, limits))
    _each("targets", graph.targets, check_target)
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
    # Each entry of these tables is written because a node refers to it.
    for what in ("clients", "contracts", "targets"):
        if (count := len(getattr(graph, what))) > nodes > 0:
            raise Fault(f"{count:,} {what} for {nodes:,} nodes")


def _check_tree(graph: pb.Graph, limits: Limits) -> None:
    """Children come before their parents, so there is no cycle; what is shared counts once for each path to it."""
    if not graph.modules or graph.modules[-1].WhichOneof("kind") != "graph":
        raise Fault("the last module is no GraphModule")
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
    """The nodes of each GraphModule, and how many steps a forward takes: two calls at each level would double them."""
    slots = Slots(graph)
    steps: list[int] = []
    for index, module in enumerate(graph.modules):
        if module.WhichOneof("kind") == "graph":
            checker = BodyChecker(graph, index, slots, limits)
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
    if kind == "leaf" and module.leaf not in leaves.classes():
        raise Fault(f"{module.leaf[:80]!r} is no class of torch.nn that can be rebuilt")
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
            raise Fault(f"{slot.name!r} is no parameter")
    for attribute in module.attributes:
        functions = leaves.functions_of(module.leaf, attribute.name)
        place = Place(limits=limits, kind="attribute", tensors=len(graph.tensors), functions=functions)
        check_value(attribute.value, place)
        if kind == "leaf" and attribute.value.WhichOneof("kind") in {"opaque", "handle"}:
            raise Fault(f"attribute {attribute.name!r} of a torch.nn module is opaque")
