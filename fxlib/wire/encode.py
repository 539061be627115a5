"""GraphModule into the wire format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxlib.errors import WireError
from fxlib.runtime.module import outdated
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.faults import Fault
from fxlib.wire.write_modules import ModuleWriter
from fxlib.wire.write_tensors import is_plain, storage_key

FORMAT = 1
"""Version of the wire format; raised when an older reader would misread what a newer writer writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A module on the wire: its structure, and, where asked for, its weights by SHA-256."""

    graph: pb.Graph
    blobs: Mapping[str, bytes]


def encode(module: GraphModule, *, weights: bool = False, beside: nn.Module | None = None) -> Encoded:
    """Write a GraphModule as a message; equal modules give equal bytes.

    Args:
        module: the module; a CapturedModule or any other GraphModule.
        weights: send the values of its tensors, one safetensors blob for each storage. By default none leaves the
            process: of each tensor only dtype, shape and flags travel.
        beside: a module that the reader has, and this one was made from: of its tensors no values are sent, of others
            they are.

    Raises:
        WireError: something in the graph cannot travel; names the node and the field. Or the module's weights are no
            longer those from which values in the graph were computed.
    """
    if stale := outdated(module):
        raise WireError(stale, where=type(module).__name__)
    graph = pb.Graph(format=FORMAT)
    writer = ModuleWriter(graph, module)
    writer.write(module)
    try:
        return Encoded(graph=graph, blobs=writer.tensors.finish(sent=_sent(weights=weights, beside=beside)))
    except Fault as fault:
        raise fault.at("weights") from None


def _sent(*, weights: bool, beside: nn.Module | None) -> Callable[[torch.Tensor], bool]:
    """Return whether a tensor's values are to be sent."""
    if beside is None:
        return lambda _: weights
    held = (each for module in beside.modules() for each in pytree.tree_leaves(vars(module)))
    known = {storage_key(each) for each in held if isinstance(each, torch.Tensor) and is_plain(each)}
    return lambda tensor: storage_key(tensor) not in known
