"""What the cost model says of a loop under a pipeline: figures that can be worked out on paper."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxlib import ps
from fxlib.analysis.cost.bound import bound_pipelined
from fxlib.analysis.cost.costs import Loop
from fxlib.analysis.cost.pipelined import predict_pipelined
from fxlib.analysis.effects.prologue import Way
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import send_gradient
from fxlib.spec.contract import Contract, contract_of
from fxlib.spec.profile import Profile, Push, Spread
from tests.analysis.cost.test_bound import random_profile, random_program
from tests.analysis.cost.test_simulate import MS, call, profile, server
from tests.analysis.sketch import READ, Sketch

COSTS = 1e-4
"""Seconds that the trainer's own handling of what runs ahead may take here."""


def one_lookup(contract: Contract = READ, *, pushes: bool = False) -> CapturedModule:
    """A lookup by the batch's keys, and work on its rows."""
    program = Sketch("ids")
    (ids,) = program.inputs
    found = program.call("a", "t", ids, contract=contract)
    if pushes:
        arguments: tuple[Any, ...] = (found, "ps0", f"{ps.__name__}:push", ("t", ids), {}, None, 0)
        found = program.work("leaf", send_gradient, *arguments)
    return program.returns(program.work("top", torch.relu, found))


def of_ps(function: Any) -> Contract:
    found = contract_of(function)
    assert found is not None
    return found


def pushing(lookup_ms: float, push_ms: float, work_ms: float) -> Profile:
    push = Push(
        function=f"{ps.__name__}:push",
        request_bytes=0,
        issue_s=0.0,
        service_s=Spread.of([push_ms * MS]),
        ready_s=0.0,
    )
    return profile([call("a", lookup_ms, push=push)], {"top": 3.0, "leaf": 0.0}, backward_s=work_ms - 3.0)


def test_a_read_of_what_nobody_writes_has_a_step_and_the_wait_in_its_own_to_come() -> None:
    for lookup_ms, work_ms, depth, expected_ms in ((4.0, 9.0, 1, 9.0), (12.0, 9.0, 1, 10.5), (12.0, 9.0, 2, 9.0)):
        known = profile([call("a", lookup_ms)], {"top": work_ms})
        found = predict_pipelined(one_lookup(), known, Loop(depth=depth))
        assert found.by_way[Way.NOTHING_WRITTEN] == pytest.approx(expected_ms * MS, abs=COSTS)
        assert found.by_way[None] == pytest.approx((lookup_ms + work_ms) * MS)
        assert found.step_s == found.by_way[Way.NOTHING_WRITTEN]


@pytest.mark.parametrize("lookup_ms, work_ms, depth", [(80, 1, 8), (40, 2, 5), (80, 9, 8)])
def test_a_read_of_several_steps_is_waited_for_once_for_all_that_were_on_the_way(
    lookup_ms: float, work_ms: float, depth: int
) -> None:
    known = profile([call("a", lookup_ms)], {"top": work_ms})
    found = predict_pipelined(one_lookup(), known, Loop(depth=depth))
    assert found.step_s == pytest.approx((lookup_ms + work_ms) / (depth + 1) * MS, abs=COSTS)


@pytest.mark.parametrize("share, with_state", [(0.0, None), (1.0, None), (0.0, f"{ps.__name__}:lookup_with_state")])
def test_a_read_of_what_a_push_writes_travels_with_it_or_ahead_by_keys(share: float, with_state: str | None) -> None:
    contract = replace(of_ps(ps.lookup), with_state=with_state)
    module = recipes.apply(one_lookup(contract, pushes=True)).module
    conflicts = {"a": 1.0 if with_state else share}  # what the trainer updates itself is not read again
    found = predict_pipelined(module, pushing(4, 2, 9), Loop(depth=1, conflicts=conflicts))
    assert found.by_way[None] == pytest.approx((4 + 9 + 2) * MS, rel=0.01)
    assert found.by_way[Way.BEHIND_PUSH] == pytest.approx((9 + 2 + 4) * MS, abs=COSTS)  # the server's work in turn
    assert found.by_way[Way.BY_KEYS] == pytest.approx((9 + 2 + 4 * share) * MS, abs=2 * COSTS)
    assert set(found.by_way) == {None, Way.BEHIND_PUSH, Way.BY_KEYS}
    limit = bound_pipelined(module, pushing(4, 2, 9), Loop(depth=1, conflicts=conflicts))
    assert limit.limiting == "conflicts"
    assert limit.step_s == pytest.approx((9 + 2 + 4 * share) * MS)


def test_a_round_trip_is_saved_where_latency_and_not_work_takes_time() -> None:
    module = recipes.apply(one_lookup(of_ps(ps.lookup), pushes=True)).module
    known = replace(pushing(4, 4, 9), servers=(server(round_trip_s=4 * MS),))
    found = predict_pipelined(module, known, Loop(depth=1))
    assert found.by_way[Way.BEHIND_PUSH] == pytest.approx((9 + 4) * MS, abs=2 * COSTS)


def test_with_several_trainers_what_is_pushed_stays_in_its_step() -> None:
    module = recipes.apply(one_lookup(of_ps(ps.lookup), pushes=True)).module
    found = predict_pipelined(module, pushing(4, 2, 9), Loop(depth=1, several_trainers=True))
    assert set(found.by_way) == {None}


def test_a_timeline_shows_two_steps_one_after_another() -> None:
    found = predict_pipelined(one_lookup(), profile([call("a", 4)], {"top": 9.0}), Loop(depth=1))
    forwards = [each for each in found.timeline.spans if each.kind == "forward"]
    assert len(forwards) == 2
    assert found.timeline.steps == 2
    assert found.timeline.step_s == pytest.approx(found.step_s)
    assert forwards[0].end_s <= forwards[1].start_s


def test_a_read_that_ran_ahead_is_on_its_way_during_the_work_that_its_step_does_before_it() -> None:
    program = Sketch("x")
    dense = program.work("dense", torch.sin, program.inputs[0])
    module = program.returns(dense, program.call("a", program.inputs[0]))
    known, loop = profile([call("a", 8.0)], {"dense": 5.0}), Loop(depth=1)
    limit = bound_pipelined(recipes.apply(module, recipes.from_passes([("split_calls", {})])).module, known, loop)
    assert limit.step_s == pytest.approx(5.0 * MS)
    assert limit.step_s <= predict_pipelined(recipes.apply(module, profile=known).module, known, loop).step_s


@pytest.mark.parametrize("seed", range(60))
def test_no_loop_is_simulated_to_be_shorter_than_the_bound(seed: int) -> None:
    dice = random.Random(seed)
    program = random_program(dice)
    known, depth = random_profile(program, dice), dice.choice([1, 2, 4])
    loop = Loop(depth=depth, conflicts={f"c{place}": dice.choice([0.0, 0.3, 1.0]) for place in range(6)})
    least_s = bound_pipelined(program, known, loop).step_s
    found = predict_pipelined(recipes.apply(program, profile=known).module, known, loop)
    assert least_s <= found.step_s * (1 + 1e-6)
