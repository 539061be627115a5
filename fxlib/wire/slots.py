"""Which names the parts of a module may have: none that hides what its class needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch import nn
from torch.fx import Graph

from fxlib.runtime import CapturedModule
from fxlib.runtime.data_parallel import DataParallel
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import leaves
from fxlib.wire.faults import Fault
from fxlib.wire.names import check_atom
from fxlib.wire.opaque import OpaqueModule


def check_names(module: pb.Module) -> None:
    """Raise Fault unless the parts of a module have names of their own that hide nothing."""
    cls, reserved = _holder(module)
    seen: set[str] = set()
    for what, slots in (("parameter", module.parameters), ("buffer", module.buffers), ("child", module.children)):
        for slot in slots:
            check_atom(slot.name, what)
            if slot.name in seen or slot.name in reserved or not leaves.may_have_slot(cls, slot.name):
                raise Fault(f"{what} {slot.name!r} hides something of this name", "Rename it.")
            seen.add(slot.name)
    for attribute in module.attributes:
        check_atom(attribute.name, "attribute")
        if attribute.name in seen or attribute.name in reserved or not leaves.may_hold(cls, attribute.name):
            raise Fault(f"attribute {attribute.name!r} hides something of this name", "Rename it.")
        seen.add(attribute.name)


def _holder(module: pb.Module) -> tuple[type[nn.Module], frozenset[str]]:
    kind = module.WhichOneof("kind")
    if kind == "leaf":
        return leaves.classes()[module.leaf], frozenset()
    if kind == "parallel":
        return DataParallel, frozenset()
    return (CapturedModule, _graph_state()) if kind == "graph" else (OpaqueModule, frozenset(vars(OpaqueModule(""))))


class Slots:
    """Finds the parts of a message's modules by name, however many there are."""

    def __init__(self, graph: pb.Graph) -> None:
        self._modules = graph.modules
        self._tables: dict[int, dict[str, int | None]] = {}

    def of(self, module: int) -> Mapping[str, int | None]:
        """Return the names of a module's slots, with the index of the module that is held there, if one is."""
        if module not in self._tables:
            message = self._modules[module]
            table: dict[str, int | None] = {
                slot.name: None for slots in (message.parameters, message.buffers, message.attributes) for slot in slots
            }
            table |= {slot.name: slot.module if slot.HasField("module") else None for slot in message.children}
            self._tables[module] = table
        return self._tables[module]

    def find(self, module: int, path: str) -> int | None:
        """Return the index of the module at a path; None: another slot is there.

        Raises:
            Fault: no slot is.
        """
        *steps, last = path.split(".")
        for step in steps:
            child = self.of(module).get(step)
            if child is None:
                raise Fault(f"there is no module {path[:200]!r}")
            module = child
        if last not in self.of(module):
            raise Fault(f"there is no {path[:200]!r}")
        return self.of(module)[last]


@cache
def _graph_state() -> frozenset[str]:
    """Where a GraphModule keeps its graph, code and pytree specifications."""
    return frozenset(vars(CapturedModule(nn.Module(), Graph()))) | {"_in_spec", "_out_spec"}
