"""Programs of reads of one table, and what a profile says of them."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from fxlib.passes import CoalesceCalls, SplitCalls
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Recipe, Rewrite
from fxlib.runtime.ops.registry import is_batch, waits_of
from fxlib.spec.contract import Contract
from fxlib.spec.profile import CallProfile, Opaque, Profile, ServerProfile, Spread
from tests.analysis.sketch import Sketch

READ = Contract(reads=frozenset({"table"}), batchable=True)
COUNT = Contract(reads=frozenset({"count"}), batchable=True)
MANY = Contract(reads=frozenset({"table"}), batchable=True, batched_by="shop:many")


def coalesced(
    module: GraphModule, profile: Profile | None = None, workload: Any = None, **options: Any
) -> tuple[Rewrite, list[list[str]]]:
    """Apply the pass; return the rewrite and the names of the calls of each batch."""
    recipe = Recipe(name="test", passes=(SplitCalls(), CoalesceCalls(**options)))
    rewrite = recipes.apply(module, recipe, profile=profile, workload=workload)
    return rewrite, [[wait.name for wait in waits_of(node) or ()] for node in batches(rewrite.module)]


def batches(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if is_batch(node)]


def call(
    name: str, *, to: str = "ps0", service_s: float = 1e-3, issue_s: float = 1e-4, size: int = 1000
) -> CallProfile:
    return CallProfile(
        call=name,
        function=f"shop:{name}",
        to=to,
        request_bytes=size,
        response_bytes=0,
        returns=Opaque(),
        issue_s=issue_s,
        wait_s=1e-5,
        service_s=Spread.of([service_s]),
    )


def server(per_item_s: float | None, per_turn_s: float | None = None) -> ServerProfile:
    return ServerProfile(
        name="ps0", round_trip_s=1e-4, concurrency=16, bytes_per_s=1e9, per_item_s=per_item_s, per_turn_s=per_turn_s
    )


def three_reads(contract: Contract = READ) -> GraphModule:
    program = Sketch("ids")
    reads = [program.call(name, program.inputs[0], contract=contract) for name in "abc"]
    for read in reads:
        read.args = (read.args[0], "shop:lookup", *read.args[2:])
    return program.returns(*reads)
