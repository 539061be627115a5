"""A profile decides what a program is planned to take; whatever it says, there is a plan."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import ps
from fxlib.analysis.cost.bound import bound
from fxlib.analysis.cost.simulate import predict
from fxlib.errors import WorkloadError
from fxlib.recipes import recipes
from fxlib.runtime import is_call
from fxlib.runtime.ops.registry import is_batch
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, Profile, Push, ServerProfile, Spread


class Clicks(nn.Module):
    """Reads of two servers, and a write between them."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.bottom(x)
        for place in range(4):
            hidden = hidden + rpc.rpc_sync(f"ps{place % 2}", ps.lookup, args=("users", rows + place))
        rpc.rpc_sync("ps0", ps.push, args=("users", rows, hidden.detach()))
        return self.top(hidden + rpc.rpc_sync("ps0", ps.lookup, args=("users", rows)))


GRAPH = fxlib.capture(Clicks())
CALLS = [node.name for node in GRAPH.graph.nodes if is_call(node)]
seconds = st.sampled_from([0.0, 5e-324, 1e-6, 1e-3, 1.0, 86_400.0])
sizes = st.sampled_from([0, 1, 4096, 1 << 50])
names = st.sampled_from(["ps0", "ps1", "elsewhere", ""])
spreads = st.lists(seconds, min_size=1, max_size=4).map(lambda each: Spread(quantiles=tuple(sorted(each))))
pushes = st.builds(
    Push, function=st.just("fxlib.ps:push"), request_bytes=sizes, issue_s=seconds, service_s=spreads, ready_s=seconds
)
calls = st.builds(
    CallProfile,
    call=st.sampled_from(CALLS),
    function=st.sampled_from(["fxlib.ps:lookup", "another:function"]),
    to=names,
    request_bytes=sizes,
    response_bytes=sizes,
    returns=st.just(Opaque()),
    issue_s=seconds,
    wait_s=seconds,
    service_s=spreads,
    wake_s=seconds,
    push=st.none() | pushes,
)
servers = st.builds(
    ServerProfile,
    name=names,
    round_trip_s=seconds,
    concurrency=st.sampled_from([1, 65_536]),
    bytes_per_s=st.sampled_from([1.0, 1e9]),
    per_item_s=st.none() | seconds,
    per_call_s=st.none() | seconds,
    per_turn_s=st.none() | seconds,
)
nodes = st.builds(
    NodeProfile, node=st.sampled_from([node.name for node in GRAPH.graph.nodes]), seconds=seconds, output_bytes=sizes
)
profiles = st.builds(
    Profile,
    calls=st.lists(calls, unique_by=lambda each: each.call).map(tuple),
    servers=st.lists(servers, unique_by=lambda each: each.name).map(tuple),
    nodes=st.lists(nodes, unique_by=lambda each: each.node).map(tuple),
    backward_s=seconds,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(profiles)
def test_a_profile_of_whatever_program_is_planned_by(profile: Profile) -> None:
    planned = recipes.apply(GRAPH, "schedule", profile=profile).module
    planned.graph.lint()
    assert all(math.isfinite(predict(each, profile).step_s) for each in (GRAPH, planned))
    assert math.isfinite(bound(GRAPH, profile).step_s)


def test_calls_that_travel_together_may_have_gone_to_other_servers_in_the_profile() -> None:
    push = Push(function="fxlib.ps:push", request_bytes=1, issue_s=0.0, service_s=Spread.of([1e-3]), ready_s=0.0)
    known = [
        CallProfile(
            call=call,
            function="fxlib.ps:lookup",
            to=to,
            request_bytes=1,
            response_bytes=1,
            returns=Opaque(),
            issue_s=0.0,
            wait_s=0.0,
            service_s=Spread.of([1e-3]),
            push=push,
        )
        for call, to in zip(CALLS, ("ps0", "ps1", "elsewhere", "nowhere"), strict=False)
    ]
    profile = Profile(calls=tuple(known))
    planned = recipes.apply(GRAPH, "schedule").module
    assert any(map(is_batch, planned.graph.nodes))
    assert predict(planned, profile).step_s > 0.0


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize(
    "part, field, others",
    [
        (Spread, "quantiles", {}),
        (NodeProfile, "seconds", {"node": "add", "output_bytes": 0}),
        (NodeProfile, "output_bytes", {"node": "add", "seconds": 0.0}),
        (Profile, "backward_s", {}),
        (Profile, "least_share", {}),
        (ServerProfile, "round_trip_s", {"name": "ps0", "concurrency": 1, "bytes_per_s": 1.0}),
        (ServerProfile, "per_item_s", {"name": "ps0", "concurrency": 1, "bytes_per_s": 1.0, "round_trip_s": 0.0}),
        (ServerProfile, "bytes_per_s", {"name": "ps0", "concurrency": 1, "round_trip_s": 0.0}),
    ],
)
def test_a_figure_that_no_clock_gives_is_refused_by_the_part_that_holds_it(
    part: Any, field: str, others: dict[str, Any], figure: float
) -> None:
    with pytest.raises(WorkloadError, match=part.__name__):
        part(**others, **{field: (figure,) if field == "quantiles" else figure})


def test_quantiles_ascend_and_a_server_works_on_something() -> None:
    for quantiles in ((), (2.0, 1.0)):
        with pytest.raises(WorkloadError, match="ascending"):
            Spread(quantiles=quantiles)
    with pytest.raises(WorkloadError, match="at least one call"):
        ServerProfile(name="ps0", round_trip_s=0.0, concurrency=0, bytes_per_s=1.0)
