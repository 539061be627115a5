"""RRefs of a message: where the root's nodes read them, and who owns what they lead to."""

from __future__ import annotations

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.opaque import OpaqueRRef


def handles_in(graph: pb.Graph) -> dict[str, OpaqueRRef]:
    """Return the RRefs that the root's own nodes read, by their paths; `validate` has passed the graph."""
    root = len(graph.modules) - 1
    targets = {node.target for node in graph.modules[root].graph.nodes if node.op == pb.OPCODE_GET_ATTR}
    children: dict[int, dict[str, int]] = {}
    attributes: dict[int, dict[str, pb.Value]] = {}
    found: dict[str, OpaqueRRef] = {}
    for path in sorted(graph.targets[index].path for index in targets):
        *steps, last = path.split(".")
        module = root
        for step in steps:
            if module not in children:
                slots = graph.modules[module].children
                children[module] = {slot.name: slot.module for slot in slots if slot.HasField("module")}
            module = children[module][step]
        if module not in attributes:
            attributes[module] = {each.name: each.value for each in graph.modules[module].attributes}
        value = attributes[module].get(last)
        if value is not None and value.WhichOneof("kind") == "handle":
            found[path] = OpaqueRRef(value.handle.slot, value.handle.owner, here=value.handle.here)
    return found
