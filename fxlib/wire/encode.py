"""Writes a GraphModule to the wire format and to bytes, deterministically: equal modules have equal digests.

Children are written before parents, and tied parts once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from google.protobuf.message import DecodeError
from torch import nn
from torch.distributed import rpc
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxlib.errors import WireError
from fxlib.runtime.data_parallel import described
from fxlib.runtime.guards.folded_weights import sources_of
from fxlib.runtime.module import outdated
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import modules
from fxlib.wire.callables import Labels, bodies, label_of
from fxlib.wire.faults import DEFAULT, Fault, Limits, excess
from fxlib.wire.graphs import Tables, write_body
from fxlib.wire.modules import check_names, write_data_parallel
from fxlib.wire.opaque import OpaqueAttribute, OpaqueModule, OpaqueRRef
from fxlib.wire.targets import function_name
from fxlib.wire.tensors import TensorWriter, is_plain, storage_key
from fxlib.wire.values import ValueWriter

FORMAT = 1
"""Version of the wire format; it increases when an older reader would misread what a newer writer writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A module on the wire: its structure and, on request, its weights by SHA-256."""

    graph: pb.Graph
    blobs: Mapping[str, bytes]


def encode(module: GraphModule, *, weights: bool = False, beside: nn.Module | None = None) -> Encoded:
    """Write a GraphModule as a message; equal modules give equal bytes.

    Args:
        module: the module; a CapturedModule or any other GraphModule.
        weights: whether to send the values of its tensors, one safetensors blob for each storage. By default none
            leaves the process: only the dtype, shape and flags of each tensor travel.
        beside: a module that the reader has, and that this one was made from: values are sent except for its tensors.

    Raises:
        WireError: something in the graph cannot travel (the message names the node and the field), or the module's
            weights are no longer those from which values in the graph were computed.
    """
    if stale := outdated(module):
        raise WireError(stale, where=type(module).__name__)
    graph = pb.Graph(format=FORMAT)
    writer = _ModuleWriter(graph, module)
    writer.write(module)
    try:
        return Encoded(graph=graph, blobs=writer.tensors.finish(sent=_sent(weights=weights, beside=beside)))
    except Fault as fault:
        raise fault.at("weights") from None


def _sent(*, weights: bool, beside: nn.Module | None) -> Callable[[torch.Tensor], bool]:
    """Return the predicate that says whether a tensor's values are to be sent."""
    if beside is None:
        return lambda _: weights
    held = (each for module in beside.modules() for each in pytree.tree_leaves(vars(module)))
    known = {storage_key(each) for each in held if isinstance(each, torch.Tensor) and is_plain(each)}
    return lambda tensor: storage_key(tensor) not in known


class _ModuleWriter:
    """Writes a GraphModule and everything that it holds."""

    def __init__(self, graph: pb.Graph, root: GraphModule) -> None:
        self.tensors = TensorWriter(graph)
        self._graph = graph
        self._tables = Tables(graph, Labels(root))
        self._read = attributes_read(root)
        self._index: dict[int, int] = {}
        self._open: set[int] = set()
        self._values = ValueWriter(special=self._write_special)

    def write(self, module: nn.Module, path: str = "", depth: int = 0) -> int:
        """Write a module after its children; return its index.

        Raises:
            WireError: something in it cannot travel; the message names the module, and the node and field if there is
                one.
        """
        if id(module) in self._index:
            return self._index[id(module)]
        where = f"module {path!r}" if path else "the root module"
        if id(module) in self._open:
            raise WireError("the module holds itself", where=where)
        if depth > DEFAULT.nesting:
            raise excess("nesting of modules", depth, DEFAULT.nesting, "nesting").at(where)
        self._open.add(id(module))
        parallel = described(module)
        children = {
            name: None if child is None else self.write(child, f"{path}.{name}" if path else name, depth + 1)
            for name, child in (parallel or module)._modules.items()
        }
        message = pb.Module(training=module.training)
        try:
            for name, child in children.items():
                message.children.add(name=name, module=child)
            if parallel is not None:
                write_data_parallel(message.parallel, parallel)
            else:
                self._write_class(message, module, path)
            check_names(message)
        except Fault as fault:
            raise fault.at(where) from None
        self._open.remove(id(module))
        index = self._index[id(module)] = len(self._graph.modules)
        self._graph.modules.append(message)
        return index

    def _write_class(self, message: pb.Module, module: nn.Module, path: str) -> None:
        if isinstance(module, GraphModule) and (not path or not modules.has_hooks(module)):
            write_body(message.graph, module, self._tables)
        elif self._write_leaf(message, module, path):
            return
        else:
            message.opaque = module._fxlib_label if isinstance(module, OpaqueModule) else label_of(type(module))
        self._write_tensors(message, module, path)
        self._write_attributes(message, module, path)

    def _write_leaf(self, message: pb.Module, module: nn.Module, path: str) -> bool:
        """Write a module of torch.nn; return False if it cannot be rebuilt without its constructor."""
        name = modules.class_name(module)
        slots = (*module._parameters.values(), *module._buffers.values())
        attributes = dict(modules.attributes(module))
        if (
            name is None
            or not all(tensor is None or is_plain(tensor) for tensor in slots)
            or not all(modules.may_hold(type(module), key) for key in attributes)
            or not all(fits(data, modules.functions_of(name, key)) for key, data in attributes.items())
        ):
            return False
        message.leaf = name
        self._write_tensors(message, module, path)
        for key, data in attributes.items():
            self._values.write(message.attributes.add(name=key).value, data)
        return True

    def _write_tensors(self, message: pb.Module, module: nn.Module, path: str) -> None:
        for slots, table in ((message.parameters, module._parameters), (message.buffers, module._buffers)):
            for name, tensor in table.items():
                if tensor is None or is_plain(tensor):
                    label = f"{path}.{name}" if path else name
                    index = None if tensor is None else self.tensors.add(tensor, label)
                    transient = tensor is not None and name in module._non_persistent_buffers_set
                    slots.add(name=name, tensor=index, transient=transient)

    def _write_attributes(self, message: pb.Module, module: nn.Module, path: str) -> None:
        slots = {slot.name for slots in (message.parameters, message.buffers) for slot in slots}
        slots |= {child.name for child in message.children}
        for name in self._read.get(id(module), ()):
            if name not in slots:
                label = f"{path}.{name}" if path else name
                value, data = message.attributes.add(name=name).value, getattr(module, name)
                if isinstance(data, (OpaqueRRef, rpc.PyRRef)):
                    _write_handle(value.handle, data if isinstance(data, OpaqueRRef) else OpaqueRRef.of(label, data))
                elif fits(data):
                    self._values.write(value, data)
                else:
                    value.opaque = data.slot if isinstance(data, OpaqueAttribute) else label

    def _write_special(self, value: pb.Value, data: object) -> bool:
        if isinstance(data, torch.Tensor) and is_plain(data):
            value.tensor = self.tensors.add(data)
            return True
        name = function_name(data)
        if name is not None:
            value.function = name
        return name is not None


def _write_handle(message: pb.Handle, rref: OpaqueRRef) -> None:
    message.slot, message.owner, message.here = rref.slot, rref.owner_name(), rref.is_owner()


def fits(data: object, functions: Collection[str | None] = ()) -> bool:
    """Return whether an attribute can travel, before any part of it is written, so that nothing is left over."""

    def special(_: pb.Value, part: object) -> bool:
        return (isinstance(part, torch.Tensor) and is_plain(part)) or function_name(part) in functions

    try:
        ValueWriter(special=special).write(pb.Value(), data)
    except Fault:
        return False
    return True


def attributes_read(root: GraphModule) -> dict[int, list[str]]:
    """Return the names of the attributes that nodes read, or hold values computed from, by the module that has them."""
    read: dict[int, dict[str, None]] = {}
    for body in bodies(root):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                for path in dict.fromkeys((str(node.target), *sources_of(node))):
                    *steps, name = path.split(".")
                    owner = _walk(body, steps, f"node {node.name!r}, target")
                    read.setdefault(id(owner), {})[name] = None
    return {owner: list(names) for owner, names in read.items()}


def _walk(module: nn.Module, steps: Iterable[str], where: str) -> nn.Module:
    found: Any = module
    for step in steps:
        found = found._modules.get(step)
        if found is None:
            raise WireError(f"there is no module {step!r} on the way to it", where=where)
    return found


def serialize(graph: pb.Graph) -> bytes:
    """Return the bytes of a graph; equal graphs give equal bytes in every process."""
    return graph.SerializeToString(deterministic=True)


def parse(data: bytes, limits: Limits = DEFAULT) -> pb.Graph:
    """Return the graph that bytes hold, checking only its size; `validate` and `decode` check the rest.

    Raises:
        LimitError: there are too many bytes.
        WireError: the bytes are truncated, nested too deeply, or not a graph at all.
    """
    if len(data) > limits.graph_bytes:
        raise excess("bytes of a graph", len(data), limits.graph_bytes, "graph_bytes").at("graph")
    try:
        return pb.Graph.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"the bytes are not a graph: {error}", where="graph") from None


def digest(graph: pb.Graph) -> str:
    """Return the SHA-256, in hexadecimal digits, of the graph's serialization."""
    return hashlib.sha256(serialize(graph)).hexdigest()


def values_of(graph: pb.Graph) -> list[pb.BlobRef]:
    """Return the blobs that hold the values of a graph's tensors, each once, in the order of its storages."""
    refs = [storage.data for storage in graph.storages if storage.HasField("data")]
    return list({ref.sha256: ref for ref in refs}.values())
