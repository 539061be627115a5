"""A worker that rewrites as it is asked to, and measures nothing."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from fxlib import protocol
from fxlib.recipes import recipes
from fxlib.spec.report import Report
from fxlib.v1 import workers_pb2
from tests.shared.real_service import adopt


def as_asked(lease: workers_pb2.Lease, graph: GraphModule) -> tuple[Report, GraphModule]:
    """Apply the recipe of the request to the graph, and say that the result is faster."""
    rewrite = recipes.apply(graph, protocol.recipe_from_proto(lease.request.recipe))
    report, _ = adopt(lease, graph)
    return replace(report, passes=rewrite.passes, preserves=rewrite.preserves), rewrite.module
