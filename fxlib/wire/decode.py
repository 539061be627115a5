"""GraphModule out of the wire format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fxlib.errors import WireError
from fxlib.runtime import CapturedModule
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.callables import Labels, tuple_classes
from fxlib.wire.faults import Fault
from fxlib.wire.limits import DEFAULT, Limits
from fxlib.wire.read_graph import GraphReader
from fxlib.wire.read_modules import ModuleReader
from fxlib.wire.read_tensors import TensorReader
from fxlib.wire.read_values import ValueReader
from fxlib.wire.structures import container_classes
from fxlib.wire.validate import validate

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
        root: the client's own module. Its submodules, parameters, buffers and attributes are used where the graph has
            parts like them at the same paths (the same objects, so optimizers and checkpoints notice nothing), and its
            callables fill the opaque slots.
        functions: callables that fill opaque slots, by the slots' names ("package.module.function").
        seed: without `root`, tensors whose values were not sent are drawn from it, alike in every process; opaque
            callables raise OpaqueError when they are called.
        limits: how large the graph may be.

    Raises:
        LimitError: the graph exceeds a limit.
        WireError: the graph is malformed, names what is not allowed, lacks a blob, or does not fit `root`; the message
            names the module, the node and the field.
    """
    validate(graph, limits)
    own = None if root is None else Labels(root)
    tuples = {} if root is None else tuple_classes(root)
    containers = {} if root is None else container_classes(root)
    try:
        graphs = GraphReader(graph, ValueReader(tuples=tuples), own, functions, containers)
    except Fault as fault:
        raise fault.at("graph") from None
    tensors = TensorReader(graph, blobs, None if root is not None else seed)
    try:
        return ModuleReader(graph, tensors, graphs).read(root)
    except RecursionError:
        raise WireError("the graph is nested too deeply to be built", where="graph") from None
