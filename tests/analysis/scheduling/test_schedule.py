"""Where the scheduler puts issues and waits, by what everything costs; and the limits it keeps."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxlib.analysis.cost.simulate import predict
from fxlib.errors import PassError
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import limit_in_flight
from fxlib.spec.contract import Contract
from fxlib.spec.profile import Profile
from tests.analysis.cost.test_bound import random_profile, random_program
from tests.analysis.cost.test_simulate import MS, SCHEDULE, call, profile, server, two_lookups
from tests.analysis.sketch import Sketch, names


def schedule(module: CapturedModule, known: Profile, **limits: int) -> list[str]:
    recipe = recipes.from_passes([("split_calls", {}), ("overlap_calls", limits), ("fold_pairs", {})])
    return names(recipes.apply(module, recipe, profile=known).module)


def chain() -> CapturedModule:
    """A call that needs the result of another, and two pieces of work that need neither."""
    program = Sketch("x", "ids")
    x, ids = program.inputs
    first = program.call("first", ids)
    second = program.call("second", program.work("then", torch.add, first, 1))
    one = program.work("one", torch.sin, x)
    two = program.work("two", torch.cos, one)
    return program.returns(second, two)


def test_the_first_of_two_levels_hides_behind_work_too() -> None:
    known = profile([call("first", 5), call("second", 5)], {"then": 0.1, "one": 5, "two": 5})
    expected = ["first_issue", "one", "first", "then", "second_issue", "two", "second"]
    assert schedule(chain(), known) == expected


def test_a_wait_that_unblocks_a_call_comes_as_soon_as_its_answer_is_expected() -> None:
    """Not only when all other work is done, which would leave nothing to hide the second call behind."""
    program = Sketch("x", "ids")
    x, ids = program.inputs
    first = program.call("first", ids)
    for place in range(10):
        x = program.work(f"w{place}", torch.sin, x)
    second = program.call("second", program.work("then", torch.add, first, 1))
    work = {"then": 0.0, **{f"w{place}": 1.0 for place in range(10)}}
    order = schedule(program.returns(x, second), profile([call("first", 3), call("second", 6)], work))
    assert order.index("second_issue") == order.index("w2") + 3


def test_what_unblocks_the_longest_call_comes_first() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    found = [program.call(name, program.work(f"for_{name}", torch.add, ids, 1)) for name in ("short", "long")]
    known = profile([call("short", 1), call("long", 9)], {"for_short": 1, "for_long": 1})
    assert schedule(program.returns(*found), known)[:2] == ["for_long", "long_issue"]


def test_waits_come_in_the_order_in_which_their_answers_are_expected() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    found = [program.call(name, ids) for name in ("slow", "fast")]
    pooled = [program.work(f"pool_{each.name}", "sum", each) for each in found]
    known = profile([call("slow", 9), call("fast", 1)], {"pool_slow": 1, "pool_fast": 1})
    both = program.work("both", torch.add, *pooled)
    assert schedule(program.returns(both), known)[1:] == ["fast", "pool_fast", "slow", "pool_slow", "both"]


def test_values_that_are_returned_are_made_in_the_programs_order() -> None:
    """Their hooks run in this order."""
    program = Sketch("ids")
    pooled = [program.work(f"pool_{name}", "sum", program.call(name, *program.inputs)) for name in ("slow", "fast")]
    known = profile([call("slow", 9), call("fast", 1)], {"pool_slow": 1, "pool_fast": 1})
    order = schedule(program.returns(*pooled), known)
    assert order.index("pool_slow") < order.index("pool_fast")


def test_a_pair_with_next_to_nothing_to_overlap_becomes_a_blocking_call_again() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    found = program.call("found", ids)
    dense = program.work("dense", torch.sin, x)
    module = program.returns(program.work("both", torch.add, found, dense))
    for milliseconds, expected in (
        (1.0, ["found_issue", "dense", "found", "both"]),
        (1e-7, ["found", "dense", "both"]),
    ):
        known = profile([call("found", 5)], {"dense": milliseconds, "both": 1})
        assert schedule(module, known) == expected


def two_chains() -> CapturedModule:
    """A call that needs another's answer, and later in the program one that needs work alone."""
    program = Sketch("x", "ids")
    x, ids = program.inputs
    first = program.call("first", ids)
    second = program.call("second", program.work("then", torch.add, first, 1), to="ps1")
    for place in range(8):
        x = program.work(f"w{place}", torch.matmul, x, x)
    return program.returns(second, program.call("third", x, to="ps2"))


def test_a_call_that_needs_work_alone_never_waits_for_an_answer_that_nobody_timed() -> None:
    order = names(recipes.apply(two_chains(), SCHEDULE).module)
    assert order.index("third_issue") < order.index("first")
    known = profile([call("first", 1), call("second", 9, to="ps1"), call("third", 9, to="ps2")], {})
    timed = names(recipes.apply(two_chains(), SCHEDULE, profile=known).module)
    assert timed.index("first") < timed.index("third_issue")


def test_a_call_through_a_handle_of_the_model_is_issued_before_any_answer_is_waited_for() -> None:
    root = nn.Module()
    root.handle = object()  # type: ignore[assignment]
    program = Sketch("ids", root=root)
    (ids,) = program.inputs
    first = program.call("first", ids)
    second = program.call("second", program.work("then", torch.add, first, 1), to="ps1")
    third = program.call("third", ids, to=program.state("handle"))
    order = names(recipes.apply(program.returns(second, third), SCHEDULE).module)
    assert order.index("third_issue") < order.index("first")


def test_answers_that_nobody_timed_are_waited_for_as_the_program_needs_them() -> None:
    program = Sketch("ids")
    (ids,) = program.inputs
    late, early = (program.call(name, ids, to=name) for name in ("late", "early"))
    used = program.work("used", torch.neg, early)
    order = names(recipes.apply(program.returns(program.work("both", torch.add, late, used)), SCHEDULE).module)
    assert order[2:] == ["early", "used", "late", "both"]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_schedule_is_not_predicted_to_be_slower_than_the_program(seed: int) -> None:
    dice = random.Random(seed)
    module = random_program(dice)
    known = random_profile(module, dice)
    rewritten = recipes.apply(module, SCHEDULE, profile=known).module
    handling_s = sum(each.issue_s + each.wait_s for each in known.calls)
    stolen_s = sum(each.per_call_s or 0.0 for each in known.servers) * len(known.calls)
    assert predict(rewritten, known).step_s <= predict(module, known).step_s + handling_s + stolen_s + 1e-9


def many(count: int = 6) -> CapturedModule:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    found = [program.call(f"c{place}", ids, to=f"ps{place % 2}") for place in range(count)]
    return program.returns(program.work("whole", torch.cat, [program.work("dense", torch.sin, x), *found]))


def known_of_many(size: int = 0) -> Profile:
    calls = [call(f"c{place}", 5, to=f"ps{place % 2}", size=size) for place in range(6)]
    return profile(calls, {"dense": 3, "whole": 1}, server("ps0"), server("ps1"))


def most_in_flight(order: list[str], *, to: int) -> int:
    flying = most = 0
    for name in order:
        place = int(name[1]) if name.startswith("c") else None
        if place is not None and place % 2 == to:
            # A blocking call begins and ends at once.
            split = f"c{place}_issue" in order
            most = max(most, flying + (not split))
            flying += (1 if name.endswith("_issue") else -1) if split else 0
            most = max(most, flying)
    return most


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_calls_are_in_flight_to_a_server_than_the_limit_says(limit: int) -> None:
    order = schedule(many(), known_of_many(), calls_in_flight=limit)
    assert [most_in_flight(order, to=to) for to in (0, 1)] == [limit, limit]


def test_no_more_bytes_are_in_flight_to_a_server_than_the_limit_says() -> None:
    order = schedule(many(), known_of_many(size=100), bytes_in_flight=250)
    assert [most_in_flight(order, to=to) for to in (0, 1)] == [2, 2]


def test_a_call_larger_than_the_limit_goes_alone() -> None:
    order = schedule(many(), known_of_many(size=100), bytes_in_flight=50)
    assert [most_in_flight(order, to=to) for to in (0, 1)] == [1, 1]


def test_a_call_that_nobody_waits_for_holds_no_other_call_back() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    program.issue("logged", ids, contract=Contract(writes=frozenset({"log"})))
    first = program.call("first", ids, to="ps1")
    found = program.call("found", program.work("then", torch.add, first, 1))
    dense = program.work("dense", torch.sin, x)
    known = profile([call("logged", 5), call("first", 1, to="ps1"), call("found", 5)], {"dense": 3, "then": 0.1})
    order = schedule(program.returns(dense, found), known, calls_in_flight=1)
    assert order[-3:] == ["found_issue", "dense", "found"]


def test_a_call_that_was_held_back_says_so() -> None:
    recipe = recipes.from_passes([("split_calls", {}), ("overlap_calls", {"calls_in_flight": 1}), ("fold_pairs", {})])
    rewrite = recipes.apply(many(), recipe, profile=known_of_many())
    assert Reason.HELD_BACK in {each.limited_by for each in rewrite.calls}
    first = next(node for node in rewrite.module.graph.nodes if node.op == "call_function")
    assert (first.target, first.args) == (limit_in_flight, (1, None))


def unlike() -> CapturedModule:
    """A program that keeps little: each result is pooled at once."""
    program = Sketch("x", "ids")
    x, ids = program.inputs
    pooled = [program.work(f"p{place}", "sum", program.call(f"c{place}", ids)) for place in range(6)]
    return program.returns(program.work("whole", torch.cat, [program.work("dense", torch.sin, x), *pooled]))


@pytest.mark.parametrize("extra", [0, 1000, 2500, 10_000])
def test_a_schedule_holds_no_more_memory_than_the_limit_allows(extra: int) -> None:
    calls = [call(f"c{place}", 5, size=1000) for place in range(6)]
    known = profile(calls, {"dense": 30, "whole": 1, **{f"p{place}": 1.0 for place in range(6)}})
    module = unlike()
    recipe = recipes.from_passes([("split_calls", {}), ("overlap_calls", {"memory_bytes": extra}), ("fold_pairs", {})])
    rewritten = recipes.apply(module, recipe, profile=known)
    program, scheduled = (predict(each, known).peak_bytes for each in (module, rewritten.module))
    assert scheduled <= program + extra
    assert rewritten.changed or not extra
    if extra >= 5000:
        assert scheduled > program


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), extra=st.sampled_from([0, 500, 3000]))
def test_no_schedule_of_a_random_program_holds_more_memory_than_the_limit_allows(seed: int, extra: int) -> None:
    dice = random.Random(seed)
    module = random_program(dice)
    known = random_profile(module, dice)
    recipe = recipes.from_passes([("split_calls", {}), ("overlap_calls", {"memory_bytes": extra})])
    scheduled = recipes.apply(module, recipe, profile=known).module
    assert predict(scheduled, known).peak_bytes <= predict(module, known).peak_bytes + extra


def test_limits_that_nothing_could_keep_are_refused() -> None:
    with pytest.raises(PassError, match="calls_in_flight"):
        recipes.from_passes([("overlap_calls", {"calls_in_flight": 0})])
    with pytest.raises(PassError, match="memory_bytes"):
        recipes.from_passes([("overlap_calls", {"memory_bytes": -1})])


def test_limits_are_set_once_however_often_a_program_is_scheduled() -> None:
    recipe = recipes.from_passes(
        [("split_calls", {}), ("overlap_calls", {"calls_in_flight": 1}), ("overlap_calls", {"calls_in_flight": 2})]
    )
    graph = recipes.apply(many(), recipe, profile=known_of_many()).module.graph
    assert [node.args for node in graph.find_nodes(op="call_function", target=limit_in_flight)] == [(2, None)]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_schedule_does_not_depend_on_nodes_that_came_and_went(seed: int) -> None:
    dice = random.Random(seed)
    module = random_program(dice)
    known = random_profile(module, dice)
    expected = recipes.apply(module, SCHEDULE, profile=known).module.code
    for node in list(module.graph.nodes):
        if node.op != "placeholder" and dice.random() < 0.5:
            with module.graph.inserting_before(node):
                passing = module.graph.call_function(torch.sin, (next(iter(module.graph.nodes)),), name="passing")
            module.graph.erase_node(passing)
    assert recipes.apply(module, SCHEDULE, profile=known).module.code == expected


def test_estimates_make_plans_where_nothing_was_measured() -> None:
    assert names(recipes.apply(two_lookups(), SCHEDULE).module)[:3] == ["a_issue", "b_issue", "dense"]
    assert predict(two_lookups(), None).step_s > 0.5 * MS
