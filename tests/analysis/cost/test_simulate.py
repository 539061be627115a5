"""What the cost model says of one step: figures that can be worked out on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from fxlib import ps
from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.cost.simulate import Simulation, predict
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import send_gradient, track_gradient
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, Profile, Push, ServerProfile, Spread
from tests.analysis.sketch import Sketch

MS = 1e-3


def server(name: str = "ps0", **figures: float) -> ServerProfile:
    """One whose calls take no time but that of their work, unless said otherwise."""
    usual = ServerProfile(name=name, round_trip_s=0.0, concurrency=16, bytes_per_s=1e12, per_call_s=0.0)
    return replace(usual, **figures)  # type: ignore[arg-type]


def call(name: str, milliseconds: float, *, to: str = "ps0", size: int = 0, push: Push | None = None) -> CallProfile:
    return CallProfile(
        call=name,
        function=f"shop:{name}",
        to=to,
        request_bytes=0,
        response_bytes=size,
        returns=Opaque(),
        issue_s=0.0,
        wait_s=0.0,
        service_s=Spread.of([milliseconds * MS]),
        push=push,
    )


def profile(
    calls: list[CallProfile],
    work: dict[str, float],
    *servers: ServerProfile,
    loss_s: float = 0.0,
    backward_s: float = 0.0,
    rest_s: float = 0.0,
) -> Profile:
    """Calls, milliseconds of local work by node, servers, and milliseconds of the rest of the step."""
    nodes = tuple(NodeProfile(node=name, seconds=each * MS, output_bytes=100) for name, each in work.items())
    return Profile(
        calls=tuple(calls),
        nodes=nodes,
        servers=servers or (server(),),
        loss_s=loss_s * MS,
        backward_s=backward_s * MS,
        rest_s=rest_s * MS,
    )


def two_lookups() -> CapturedModule:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    found = [program.call(name, ids) for name in ("a", "b")]
    dense = program.work("dense", torch.sin, x)
    return program.returns(program.work("both", torch.cat, [dense, *found]))


def milliseconds(simulation: Simulation) -> float:
    return round(simulation.step_s / MS, 6)


def scheduled(module: CapturedModule, known: Profile) -> GraphModule:
    return recipes.apply(module, SCHEDULE, profile=known).module


SCHEDULE = recipes.from_passes([("split_calls", {}), ("overlap_calls", {}), ("fold_pairs", {})])


def test_a_blocking_program_pays_for_its_calls_one_after_another() -> None:
    known = profile([call("a", 5), call("b", 7)], {"dense": 3, "both": 1})
    assert milliseconds(predict(two_lookups(), known)) == 5 + 7 + 3 + 1


def test_a_schedule_pays_for_the_longest_call_that_nothing_hides() -> None:
    known = profile([call("a", 5), call("b", 7)], {"dense": 3, "both": 1})
    found = predict(scheduled(two_lookups(), known), known)
    assert milliseconds(found) == 7 + 1
    assert {name: round(each.exposed_s / MS, 6) for name, each in found.by_call.items()} == {"a": 2, "b": 2}


def test_a_server_that_works_on_one_call_at_a_time_keeps_the_second_waiting() -> None:
    known = profile([call("a", 5), call("b", 7)], {"dense": 3, "both": 1}, server(concurrency=1))
    found = predict(scheduled(two_lookups(), known), known)
    assert milliseconds(found) == 5 + 7 + 1
    assert round(found.by_call["a"].started_s / MS, 6) == 7


def test_a_small_answer_waits_for_the_large_one_before_it() -> None:
    arrived = []
    for size in (0, 9000):
        calls = [call("a", 1 + size / 1000, size=size), call("b", 1.5)]
        known = profile(calls, {"dense": 0.0, "both": 0.0}, server(bytes_per_s=1e6))
        found = predict(scheduled(two_lookups(), known), known)
        arrived.append(round(found.by_call["b"].arrived_s / MS, 6))
    assert arrived == [1.5, 10]


def test_servers_share_the_trainers_own_link() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    found = [program.call(name, ids, to=to) for name, to in (("a", "ps0"), ("b", "ps1"))]
    module = program.returns(program.work("both", torch.add, *found))
    servers = [server(name, bytes_per_s=1e6) for name in ("ps0", "ps1")]
    calls = [call("a", 4, size=4000), call("b", 4, to="ps1", size=4000)]
    known = profile(calls, {"both": 0.0}, *servers)
    assert milliseconds(predict(scheduled(module, known), known)) == 8


def test_work_of_the_rpc_layer_is_done_for_one_call_at_a_time_and_slows_the_trainer() -> None:
    known = profile([call("a", 2), call("b", 2)], {"dense": 0.0, "both": 0.0}, server(per_call_s=2 * MS))
    assert milliseconds(predict(scheduled(two_lookups(), known), known)) == 4
    busy = profile([call("a", 2), call("b", 2)], {"dense": 100, "both": 0.0}, server(per_call_s=2 * MS))
    assert 100 < milliseconds(predict(scheduled(two_lookups(), busy), busy)) < 104


def test_the_rest_of_the_step_follows_the_forward() -> None:
    known = profile([call("a", 5), call("b", 7)], {"dense": 3, "both": 1}, loss_s=1, backward_s=10, rest_s=2)
    found = predict(two_lookups(), known)
    assert milliseconds(found) == 16 + 1 + 10 + 2
    assert [span.kind for span in found.timeline.spans if span.kind != "call"] == [
        *("forward", "loss", "backward", "optimizer")
    ]


def test_what_is_in_flight_counts_as_memory_from_its_issue() -> None:
    known = profile([call("a", 5, size=1000), call("b", 7, size=1000)], {"dense": 3, "both": 1})
    module = two_lookups()
    program = predict(module, known).peak_bytes
    assert program == 1000 + 1000 + 100 + 100
    assert predict(scheduled(module, known), known).peak_bytes == program


def test_a_node_that_no_profile_knows_is_estimated() -> None:
    module = two_lookups()
    costs = Costs.of(module, profile([call("a", 5)], {}))
    by_name = {node.name: seconds for node, seconds in costs.seconds.items()}
    assert by_name["dense"] > 0
    assert {each.call: each.service_s for each in costs.results.values()}["a"] == 5 * MS
    assert not Costs.of(module, None).measured


@pytest.mark.parametrize("sent", [False, True])
def test_gradients_go_home_behind_the_step(sent: bool) -> None:
    push = Push(function="shop:push", request_bytes=0, issue_s=0.0, service_s=Spread.of([4 * MS]), ready_s=6 * MS)
    program = Sketch("ids")
    (ids,) = program.inputs
    operator = send_gradient if sent else track_gradient
    found = program.call("a", ids)
    leaf = program.work("leaf", operator, found, "ps0", "shop:push", (ids,), {}, None, 0)
    known = profile([call("a", 1, push=push)], {"leaf": 0.0}, backward_s=8, rest_s=1)
    assert milliseconds(predict(program.returns(leaf), known)) == 1 + 8 + 1 + 4


@pytest.mark.parametrize("tables, milliseconds_on_the_way", [(("t0", "t1"), 1 + 3), (("t0", "t0"), 1 + 3 + 3)])
def test_gradients_for_different_parts_are_taken_side_by_side(
    tables: tuple[str, str], milliseconds_on_the_way: float
) -> None:
    push = Push(
        function=f"{ps.__name__}:push", request_bytes=0, issue_s=0.0, service_s=Spread.of([4 * MS]), ready_s=0.0
    )
    program = Sketch("ids")
    (ids,) = program.inputs
    leaves = []
    for place, table in enumerate(tables):
        found = program.call(f"a{place}", ids)
        arguments: tuple[Any, ...] = (found, "ps0", "fxlib.ps:push", (table, ids), {}, None, place)
        leaves.append(program.work(f"leaf{place}", send_gradient, *arguments))
    known = profile([call(f"a{i}", 0, push=push) for i in range(2)], {}, server(round_trip_s=1 * MS))
    module = program.returns(*leaves)
    of_forward = sum(Costs.of(module, known).seconds.values())
    on_the_way = predict(module, known).step_s - of_forward
    assert on_the_way == pytest.approx(milliseconds_on_the_way * MS, rel=0.02)


def test_a_step_on_shared_cores_is_no_shorter_than_they_were_busy_in_a_profiled_one() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    module = program.returns(program.call("a", ids))
    for busy_ms, shared_ms in ((0, 5), (3, 5), (8, 8)):
        found = predict(module, replace(profile([call("a", 5)], {}), cores_s=busy_ms * MS))
        assert [found.step_s, found.shared_s] == pytest.approx([5 * MS, shared_ms * MS])


def test_a_tracked_result_is_no_memory_of_its_own() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    found = program.call("a", ids)
    leaf = program.work("leaf", track_gradient, found, "ps0", "shop:push", (ids,), {}, None, 0)
    known = replace(
        profile([call("a", 1, size=1000)], {}), nodes=(NodeProfile(node="leaf", seconds=0.0, output_bytes=1000),)
    )
    assert predict(program.returns(leaf), known).peak_bytes == 1000


def test_only_a_wait_that_blocks_wakes_the_trainer() -> None:
    calls = [replace(call(name, 1), wake_s=0.5 * MS) for name in ("a", "b")]
    known = profile(calls, {"dense": 10, "both": 1})
    assert milliseconds(predict(two_lookups(), known)) == 1.5 + 1.5 + 10 + 1
    assert milliseconds(predict(scheduled(two_lookups(), known), known)) == 10 + 1
