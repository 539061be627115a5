"""GraphModule into the wire format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.faults import Fault
from fxlib.wire.write_modules import ModuleWriter

FORMAT = 1
"""Version of the wire format; raised when an older reader would misread what a newer writer writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A module on the wire: its structure, and, where asked for, its weights by SHA-256."""

    graph: pb.Graph
    blobs: Mapping[str, bytes]


def encode(module: GraphModule, *, weights: bool = False) -> Encoded:
    """Write a GraphModule as a message; equal modules give equal bytes.

    Args:
        module: the module; a CapturedModule or any other GraphModule.
        weights: send the values of its tensors, one safetensors blob for each storage. By default none leaves the
            process: of each tensor only dtype, shape and flags travel.

    Raises:
        WireError: something in the graph cannot travel; names the node and the field.
    """
    graph = pb.Graph(format=FORMAT)
    writer = ModuleWriter(graph, module)
    writer.write(module)
    try:
        return Encoded(graph=graph, blobs=writer.tensors.finish(weights=weights))
    except Fault as fault:
        raise fault.at("weights") from None
