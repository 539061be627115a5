"""Have a module keep, as it runs, the limits on what is in flight."""

from __future__ import annotations

from torch.fx import Graph

from fxlib.analysis.scheduling.flight_limits import Limits
from fxlib.runtime.credits import limit_in_flight


def limit_flight(graph: Graph, limits: Limits) -> None:
    """Put the limits on calls and bytes in flight at the beginning of the forward, in place of those there."""
    for node in graph.find_nodes(op="call_function", target=limit_in_flight):
        graph.erase_node(node)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(limit_in_flight, (limits.calls_in_flight, limits.bytes_in_flight))
