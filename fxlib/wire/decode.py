"""Reads a GraphModule from the wire format; its modules are new, or those that the client already has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from fxlib.errors import WireError
from fxlib.runtime import CapturedModule
from fxlib.runtime.data_parallel import described
from fxlib.runtime.guards.conditions import Entry, FixedAnswers
from fxlib.runtime.guards.fact_table import Facts, names_grad_mode
from fxlib.runtime.submodules import local_modules
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import modules
from fxlib.wire.callables import Labels, label_of, tuple_classes
from fxlib.wire.encode import attributes_read
from fxlib.wire.faults import DEFAULT, Fault, Limits
from fxlib.wire.graphs import GraphReader
from fxlib.wire.modules import read_data_parallel, read_options
from fxlib.wire.opaque import OpaqueModule, OpaqueRRef
from fxlib.wire.structures import container_classes
from fxlib.wire.targets import function_name
from fxlib.wire.tensors import TensorReader
from fxlib.wire.validate import validate
from fxlib.wire.values import ValueReader, ValueWriter

_NO_BLOBS: Mapping[str, bytes] = {}
_NO_FUNCTIONS: Mapping[str, Callable[..., Any]] = {}


def decode(
    graph: pb.Graph,
    *,
    blobs: Mapping[str, bytes] = _NO_BLOBS,
    root: nn.Module | None = None,
    functions: Mapping[str, Callable[..., Any]] = _NO_FUNCTIONS,
    seed: int = 0,
    limits: Limits = DEFAULT,
) -> CapturedModule:
    """Check a message and build the module that it describes. Nothing is executed but what torch.fx generates from it.

    Args:
        graph: the message.
        blobs: weights, as safetensors files by SHA-256.
        root: the client's own module. Its submodules, parameters, buffers and attributes are used wherever the graph
            has matching parts at the same paths (the same objects, so optimizers and checkpoints are not affected), and
            its callables fill the opaque slots.
        functions: callables that fill opaque slots, by the slots' names ("package.module.function").
        seed: without `root`, tensors whose values were not sent are drawn from this seed, the same in every process;
            opaque callables raise OpaqueError when they are called.
        limits: how large the graph may be.

    Raises:
        LimitError: the graph exceeds a limit.
        WireError: the graph is malformed, names what is not allowed, lacks a blob, or does not fit `root`; the message
            names the module, the node and the field.
    """
    validate(graph, limits)
    own = None if root is None else Labels(root)
    tuples = {} if root is None else tuple_classes(root)
    containers = None if root is None else container_classes(root)
    try:
        graphs = GraphReader(graph, ValueReader(tuples=tuples), own, functions, containers)
    except Fault as fault:
        raise fault.at("graph") from None
    tensors = TensorReader(graph, blobs, None if root is not None else seed)
    try:
        return ModuleReader(graph, tensors, graphs).read(root)
    except RecursionError:
        raise WireError("the graph is nested too deeply to be built", where="graph") from None


_MISSING = object()


def _asked(own: nn.Module) -> FixedAnswers:
    return FixedAnswers(grad_mode=names_grad_mode(each for _, each in local_modules(own)), tensor_metadata=True)


class ModuleReader:
    """Builds the modules of a checked message, each once.

    If the client's module has a matching part at the same path, that object itself is used.
    """

    def __init__(self, graph: pb.Graph, tensors: TensorReader, graphs: GraphReader) -> None:
        self._graph = graph
        self._tensors = tensors
        self._graphs = graphs
        self._built: dict[int, nn.Module] = {}
        self._owns: dict[int, nn.Module | None] = {}
        """The client's module for which each was built."""
        self._read: Mapping[int, Collection[str]] | None = None
        self._flags: dict[nn.Module, bool] = {}
        """Training flags for which the graph was made, by the client's own modules."""
        self._indices: dict[str, int] = {}
        """Indices of the parameters and buffers that were built, by name."""
        self._entries: list[Entry] = []
        """The RRefs of the client's modules that the graph reads."""

    def read(self, own: nn.Module | None) -> CapturedModule:
        """Return the root, on the state of the client's module `own` if that is given.

        Raises:
            WireError: a part can neither be built nor found in `own`.
        """
        message = self._graph.modules[-1]
        self._read = attributes_read(own) if isinstance(own, GraphModule) else None
        if own is None:
            module = CapturedModule(nn.Module(), Graph(), class_name=message.graph.class_name)
            module.training = message.training
        else:
            original = None if isinstance(own, CapturedModule) else own
            module = CapturedModule(own, Graph(), original=original, asked=_asked(own))
        self._fill(module, message, own, "")
        module.keep_own_parts()
        _set_graph(module, self._graphs.read(message.graph), "the root module")
        if own is not None and not isinstance(own, CapturedModule):
            module._fxlib.conditions.python = Facts.unread(
                (each for _, each in local_modules(own)), None if isinstance(own, GraphModule) else module.graph
            )
            module._fxlib.conditions.fix_entries(self._entries)
        module._fxlib.conditions.fix_training({**self._flags, module: message.training})
        if own is not None and (weights := module._fxlib.weight_assumptions.weights):
            module._fxlib.weight_assumptions.changed([each for each in weights if self._is_another(each)])
        return module

    def _is_another(self, name: str) -> bool:
        return name in self._indices and self._tensors.is_another(self._indices[name], name)

    def _module(self, index: int, own: nn.Module | None, path: str) -> nn.Module:
        if index not in self._built:
            self._owns[index] = own
            self._built[index] = self._build(self._graph.modules[index], own, path)
        elif own is not None and own is not self._owns[index]:
            raise WireError(
                "the graph has one module where the module given as root has two",
                where=f"module {path!r}",
                hint="Decode with the module that was captured.",
            )
        return self._built[index]

    def _build(self, message: pb.Module, own: nn.Module | None, path: str) -> nn.Module:
        kind, where = message.WhichOneof("kind"), f"module {path!r}"
        if own is not None:
            self._flags[own] = message.training
        if kind == "graph":
            graph_module = GraphModule(nn.Module(), Graph(), message.graph.class_name)
            self._fill(graph_module, message, own, path)
            _set_graph(graph_module, self._graphs.read(message.graph), where)
            graph_module.training = message.training
            return graph_module
        if kind == "parallel":
            return self._build_parallel(message, own, path)
        module = modules.new(message.leaf) if kind == "leaf" else OpaqueModule(message.opaque)
        module.training = message.training
        same = self._fill(module, message, own, path)
        if own is not None and same and _alike(message, own):
            return own
        if kind == "opaque" and self._tensors.bound and (own is None or not _alike(message, own)):
            hint = "Decode with the module that was captured."
            raise WireError(f"the module given as root has no {message.opaque} here", where=where, hint=hint)
        try:
            modules.finish(module)
        except Fault as fault:
            raise fault.at(where) from None
        return module

    def _build_parallel(self, message: pb.Module, own: nn.Module | None, path: str) -> nn.Module:
        """Return the client's own `DistributedDataParallel`, or a stand-in; the module inside is bound in any case."""
        theirs = None if own is None else described(own)
        child = message.children[0].module
        inside = self._module(child, None if theirs is None else theirs.module, f"{path}.module")
        if own is not None and theirs is not None and theirs.options == read_options(message.parallel):
            return own
        if self._tensors.bound:
            problem = "the module given as root has no DistributedDataParallel like this here"
            raise WireError(problem, where=f"module {path!r}", hint="Decode with the module that was captured.")
        module = read_data_parallel(message.parallel, inside)
        module.training = message.training
        return module

    def _fill(self, module: nn.Module, message: pb.Module, own: nn.Module | None, path: str) -> bool:
        """Set all parts of a module; return whether each of them is the client's own."""
        prefix = f"{path}." if path else ""
        same = True
        for slots, table in ((message.parameters, "_parameters"), (message.buffers, "_buffers")):
            theirs = {} if own is None else getattr(own, table)
            for slot in slots:
                tensor = self._tensor(slot, theirs.get(slot.name), prefix + slot.name)
                same = same and tensor is theirs.get(slot.name, _MISSING)
                getattr(module, table)[slot.name] = tensor
                if slot.transient:
                    module._non_persistent_buffers_set.add(slot.name)
        children = {} if own is None else own._modules
        for child in message.children:
            theirs_at = children.get(child.name)
            built = self._module(child.module, theirs_at, prefix + child.name) if child.HasField("module") else None
            same = same and built is children.get(child.name, _MISSING)
            module._modules[child.name] = built
        for attribute in message.attributes:
            vars(module)[attribute.name] = self._attribute(attribute, own, prefix + attribute.name)
        if own is not None and own is not module:
            _adopt_rest(module, own)
        return same

    def _tensor(self, slot: pb.TensorSlot, own: object, name: str) -> torch.Tensor | None:
        if not slot.HasField("tensor"):
            return None
        self._indices[name] = slot.tensor
        self._tensors.bind(slot.tensor, own, name)
        return self._tensors.read(slot.tensor, name)

    def _theirs(self, attribute: pb.Attribute, own: nn.Module, name: str) -> object:
        """Return the client's attribute if the client's own graphs read it, too: attributes may hold anything."""
        theirs = getattr(own, attribute.name, _MISSING)
        read = self._read is not None and attribute.name in self._read.get(id(own), ())
        may_read = read or self._read is None or _is_leaf(own)
        if theirs is _MISSING or read or (may_read and (not callable(theirs) or _equal(attribute.value, theirs))):
            return theirs
        if isinstance(own, GraphModule):  # which may list its model's attributes under their names
            raise WireError("the module given as root has it, but reads it nowhere", where=f"attribute {name!r}")
        return _MISSING

    def _attribute(self, attribute: pb.Attribute, own: nn.Module | None, name: str) -> object:
        theirs = _MISSING if own is None else self._theirs(attribute, own, name)
        if theirs is not _MISSING:
            if attribute.value.WhichOneof("kind") == "handle" and attribute.value.handle.slot != _slot(theirs, name):
                problem = f"the graph says that it is the RRef {attribute.value.handle.slot!r}"
                raise WireError(
                    problem, where=f"attribute {name!r}", hint="Decode a graph that was encoded from this module."
                )
            if own is not None and attribute.value.WhichOneof("kind") == "handle" and attribute.name in vars(own):
                self._entries.append(Entry(vars(own), attribute.name, theirs))
            return theirs
        if attribute.value.WhichOneof("kind") in {"opaque", "handle"} and self._tensors.bound:
            raise WireError("the module given as root has no such attribute", where=f"attribute {name!r}")
        try:
            return ValueReader(tensors=partial(self._tensors.read, name=name)).read(attribute.value)
        except Fault as fault:
            raise fault.at(f"attribute {name!r}") from None


def _slot(theirs: object, name: str) -> str:
    """Return the name by which a handle of the client's is written."""
    return theirs.slot if isinstance(theirs, OpaqueRRef) else name


def _is_leaf(module: nn.Module) -> bool:
    return modules.class_name(module) is not None


def _alike(message: pb.Module, own: nn.Module) -> bool:
    """Return whether a module of the client has the class and the attributes of the one described."""
    if message.WhichOneof("kind") == "opaque":
        return (own._fxlib_label if isinstance(own, OpaqueModule) else label_of(type(own))) == message.opaque
    if type(own) is not modules.classes()[message.leaf]:
        return False
    attributes = dict(modules.attributes(own))
    return len(attributes) == len(message.attributes) and all(
        _equal(attribute.value, attributes.get(attribute.name, _MISSING)) for attribute in message.attributes
    )


def _equal(value: pb.Value, data: object) -> bool:
    def special(written: pb.Value, part: object) -> bool:
        name = function_name(part)
        if name is not None:
            written.function = name
        return name is not None

    written = pb.Value()
    try:
        ValueWriter(special=special).write(written, data)
    except Fault:
        return False
    return written.SerializeToString(deterministic=True) == value.SerializeToString(deterministic=True)


def _adopt_rest(module: nn.Module, own: nn.Module) -> None:
    """Keep the other parts of the client's module: a module built in its place has the same `state_dict` keys."""
    for table in ("_parameters", "_buffers", "_modules"):
        for name, part in vars(own)[table].items():
            if name not in vars(module):
                vars(module)[table].setdefault(name, part)
    module._non_persistent_buffers_set.update(own._non_persistent_buffers_set)


def _set_graph(module: GraphModule, graph: Graph, where: str) -> None:
    try:
        module.graph = graph
    except Exception as error:  # noqa: BLE001 - whatever it stumbles over is a fault of the graph
        raise WireError(f"torch.fx cannot generate code for the graph: {error}", where=where) from None
    forward = inspect.unwrap(type(module).forward)
    used = {*forward.__globals__, "torch"} - ({"device"} if "device(type=" not in module.code else set())
    taken = [str(node.target).lstrip("*") for node in graph.nodes if node.op == "placeholder"]
    nested = getattr(graph._codegen, "pytree_info", None)
    for name in (*taken, *(nested.orig_args if nested is not None else ())):
        if name in used or name == "self":
            raise WireError(f"argument {name!r} hides what the generated code calls", where=where, hint="Rename it.")
