"""Is a received graph one that `encode` could have written? Checked on the message alone; no torch object is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from fxlib.errors import WireError
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import leaves
from fxlib.wire.check_graph import BodyChecker, check_target
from fxlib.wire.check_values import Place, check_sizes, check_value
from fxlib.wire.clients import check_client
from fxlib.wire.constants import DTYPES, check_device
from fxlib.wire.contracts import check_contract
from fxlib.wire.data_parallel import check_data_parallel
from fxlib.wire.encode import FORMAT
from fxlib.wire.faults import Fault, excess
from fxlib.wire.limits import DEFAULT, Limits
from fxlib.wire.names import check_comment, check_label, check_name
from fxlib.wire.slots import Slots, check_names
from fxlib.wire.write_tensors import contiguous_strides

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
    _each("storages", [graph], lambda whole: _check_storages(whole, limits))
    _each("tensors", graph.tensors, lambda tensor: _check_tensor(tensor, graph, limits))
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


_SHA256 = re.compile(r"[0-9a-f]{64}")
_NO_STRIDED = ("bits", "qint", "quint")
"""Dtypes of quantized tensors, and those without a strided form."""


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
            raise Fault(f"{storage.data.sha256[:80]!r} is no SHA-256 of a blob")
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
        raise Fault(f"a tensor of dtype {tensor.dtype} takes no gradient")
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
