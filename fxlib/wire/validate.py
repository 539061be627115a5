"""Is a received graph one that `encode` could have written? Checked on the message alone; no torch object is built."""

from __future__ import annotations

from collections.abc import Iterator

from fxlib.errors import WireError
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import leaves
from fxlib.wire.check_graph import BodyChecker, check_target
from fxlib.wire.check_tensors import check_storages, check_tensor
from fxlib.wire.check_values import Place, check_value
from fxlib.wire.contracts import check_contract
from fxlib.wire.encode import FORMAT
from fxlib.wire.faults import Fault, excess
from fxlib.wire.limits import DEFAULT, Limits
from fxlib.wire.names import check_atom, check_comment, check_label
from fxlib.wire.slots import holder, may_hold, may_have_slot


def validate(graph: pb.Graph, limits: Limits = DEFAULT) -> None:
    """Check that a graph is well-formed, within the limits, and names nothing that is not allowed.

    Raises:
        LimitError: it exceeds a limit.
        WireError: it is malformed; names the module, the node and the field.
    """
    _check_format(graph)
    if (size := graph.ByteSize()) > limits.graph_bytes:
        raise excess("bytes of a graph", size, limits.graph_bytes, "graph_bytes").at("graph")
    _check_tables(graph, limits)
    _check_tree(graph, limits)
    nodes = 0
    for index, module in enumerate(graph.modules):
        _check_module(graph, index, limits)
        if module.WhichOneof("kind") == "graph":
            nodes += len(module.graph.nodes)
            if nodes > limits.nodes:
                raise excess("nodes", nodes, limits.nodes, "nodes").at("graph")
            BodyChecker(graph, module, limits).check()


def _check_format(graph: pb.Graph) -> None:
    if graph.format != FORMAT:
        hint = "Update fxlib on this side." if graph.format > FORMAT else "Was it written by fxlib?"
        raise WireError(f"version {graph.format} of the format; this side reads {FORMAT}", where="graph.format", hint=hint)


def _check_tables(graph: pb.Graph, limits: Limits) -> None:
    for where, check in _table_checks(graph, limits):
        try:
            check()
        except Fault as fault:
            raise fault.at(where) from None


def _table_checks(graph: pb.Graph, limits: Limits) -> Iterator[tuple[str, "Check"]]:
    yield "storages", lambda: check_storages(graph, limits)
    for index, tensor in enumerate(graph.tensors):
        yield f"tensors[{index}]", lambda tensor=tensor: check_tensor(tensor, graph, limits)
    for index, target in enumerate(graph.targets):
        yield f"targets[{index}]", lambda target=target: check_target(target)
    for index, contract in enumerate(graph.contracts):
        yield f"contracts[{index}]", lambda contract=contract: check_contract(contract, limits)
    for index, text in enumerate(graph.texts):
        yield f"texts[{index}]", lambda text=text: check_comment(text, limits)
